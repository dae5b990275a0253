"""Whether the Triton kernels are right and fast on the GPU at hand, within five minutes.

    benchmarks/gpu_check.sh [--only compile,attention,cache,ops,experts,quantized,logits,sampling,ceilings,speed,decode,
                            decode_1b,sampling_speed,products,tune,flex]
                            [--budget SECONDS] [--seed N] [--quick] [--interpret]

compile makes all kernels that the parts to be run launch, in a process per processor, into Triton's cache on disk.
attention, cache, ops, experts, quantized, logits and sampling hold every kernel against float64, or against plain
PyTorch where results must be equal, on fresh random inputs in bfloat16, with outputs and the kernels' own scratch
memory filled with NaN first: the relative error ``|out - expected| / |expected|`` must be at most 1e-2. ceilings
measures the bandwidth of a copy and the rate of bfloat16 matrix products, speed the attention kernels on shapes of
models of 7 and 8 billion parameters beside PyTorch's ``scaled_dot_product_attention`` over contiguous keys. decode
writes a model of the shape of Llama 3.1 8B with random weights, in as many layers as can be written in a few seconds,
and decodes with and without CUDA graphs: time of a step, and its share of the time that reading weights and keys would
take; decode_1b does so in the shape of Llama 3.2 1B. sampling_speed times a step's draws over a vocabulary of 151,936,
products what quantised weights make of a layer, tune says which tiles the search takes, flex times FlexAttention on one
shape. Kernels are timed by the replay of CUDA graphs over several copies of their data in turn, so that neither
launches nor the cache count.

The parts' time limits add up to less than ``--budget``, and the first ones matter most. What runs over its limit ends
with the results that it has. The exit code is 1 if a result was wrong or a part that checks results failed, and 0
otherwise, also if time ran out. ``--interpret`` runs the kernels in Triton's interpreter on the CPU, on tiny shapes
with ``--quick``, which tests nothing but the script. With OUT set, all figures are in ``$OUT/gpu_check.json``, from the
first one on.

The kernels need torch (2.9 or later) and triton (3.5 or later). decode also needs what Trivet does: beside torch,
tokenizers, safetensors and transformers (5.17 will do here) these are msgspec, pydantic, pluggy and typer. What a
machine without a registry lacks can be brought as wheels: save them in a folder that git ignores by
``pip download --only-binary=:all: --python-version 3.12 -d .whl msgspec pydantic``, install them there by
``pip install --no-index --no-deps --target SITE .whl/*.whl``, and set PYTHONPATH=SITE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

#: seconds kept for the start and the end of the script
RESERVE = 10


class Part(NamedTuple):
    """A function of a module, the seconds that it may take, and whether it checks results."""

    module: str
    function: str
    seconds: int
    checks: bool = False


PARTS = {
    "compile": Part("_gpu_compile", "compile_all", 45),
    "attention": Part("_gpu_correctness", "attention", 30, checks=True),
    "cache": Part("_gpu_correctness", "cache", 5, checks=True),
    "ops": Part("_gpu_correctness", "operations", 10, checks=True),
    "experts": Part("_gpu_correctness", "experts", 10, checks=True),
    "quantized": Part("_gpu_correctness", "quantized", 10, checks=True),
    "logits": Part("_gpu_correctness", "logits", 5, checks=True),
    "sampling": Part("_gpu_correctness", "sampling", 20, checks=True),
    "ceilings": Part("_gpu_speed", "ceilings", 5),
    "speed": Part("_gpu_speed", "attention", 30),
    "decode": Part("_gpu_decode", "decode_8b", 50),
    "decode_1b": Part("_gpu_decode", "decode_1b", 30),
    "sampling_speed": Part("_gpu_speed", "sampling", 10),
    "products": Part("_gpu_speed", "products", 5),
    "tune": Part("_gpu_speed", "tune", 15),
    "flex": Part("_gpu_speed", "flex", 10),
}


class OverTimeError(BaseException):
    """A part has taken its time. Nothing but this script may handle it, so it is no ``Exception``."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise :class:`OverTimeError` in the block when it has taken ``seconds``, at the next Python instruction."""
    if seconds <= 0:
        raise OverTimeError("no time is left of the budget")

    def stop(*_: object) -> None:
        raise OverTimeError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Report:
    """What is known so far, printed and written at once."""

    def __init__(self, **facts: Any) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self._facts = facts | {"parts": self.parts}
        self._path = Path(os.environ["OUT"]) / "gpu_check.json" if "OUT" in os.environ else None

    def note(self, line: str) -> None:
        """Print a line and write all results."""
        print(line)
        if self._path is not None:
            # Never half a file, whatever ends the script.
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._facts, indent=1))
            new.replace(self._path)

    def conclude(self) -> int:
        """Say how the parts ended; returns the exit code."""
        ended = {
            state: [name for name, part in self.parts.items() if part["state"] == state]
            for state in ("wrong", "failed", "out of time", "running")
        }
        lines = [f"{state}: {', '.join(names)}" for state, names in ended.items() if names]
        self.note("\n".join(lines) or "all parts passed")
        return int(bool(ended["wrong"]))


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and return the exit code."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, of %(default)s")
    parser.add_argument("--budget", type=int, default=300, help="seconds for all parts together (default: 300)")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs; by default another one each time")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--interpret", action="store_true", help="run kernels in Triton's interpreter on the CPU")
    args = parser.parse_args(arguments)
    args.only = args.only.split(",")
    if unknown := [name for name in args.only if name not in PARTS]:
        parser.error(f"--only: there are no parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, so before they are imported
    args.device = "cpu" if args.interpret else "cuda"
    args.seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    report = Report(seed=args.seed, device=_device(args.device))
    args.note = report.note
    report.note(f"{_device(args.device)}, seed {args.seed}")
    end = began + args.budget
    watchdog = threading.Timer(max(0.0, end - time.perf_counter()), _give_up, [report])
    watchdog.daemon = True
    if not args.interpret:
        watchdog.start()
    for name in args.only:
        left = math.ceil(end - RESERVE - time.perf_counter())
        _run(name, args, report, 10 * PARTS[name].seconds if args.interpret else min(PARTS[name].seconds, left))
    watchdog.cancel()
    return report.conclude()


def _run(name: str, args: argparse.Namespace, report: Report, seconds: int) -> None:
    """Run a part; what it has filled in is kept however it ends."""
    part = PARTS[name]
    outcome: dict[str, Any] = {"state": "running", "results": {}}
    report.parts[name] = outcome
    report.note(f"== {name}")
    began = time.perf_counter()
    try:
        with limited(seconds):
            function: Callable[[argparse.Namespace, dict[str, Any]], Any] = getattr(
                import_module(part.module), part.function
            )
            function(args, outcome["results"])
        outcome["state"] = "ok"
    except OverTimeError as exc:
        outcome |= {"state": "out of time", "error": str(exc)}
    except Exception as exc:  # noqa: BLE001 - reported, and the exit code says so
        traceback.print_exc(file=sys.stdout)
        outcome |= {"state": "wrong" if part.checks else "failed", "error": f"{type(exc).__name__}: {exc}"}
    outcome["seconds"] = round(time.perf_counter() - began, 2)
    report.note(f"   {outcome['state']} after {outcome['seconds']} s")


def _give_up(report: Report) -> None:
    """End the process although a part does not: it waits for a device that does not answer."""
    for name, part in report.parts.items():
        if part["state"] == "running" and PARTS[name].checks:
            part["state"] = "wrong"
    code = report.conclude()
    sys.stdout.flush()
    os._exit(code)


def _device(device: str) -> str:
    import torch
    import triton

    name = "Triton's interpreter" if device == "cpu" else torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


if __name__ == "__main__":
    sys.exit(main())
