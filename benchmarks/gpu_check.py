"""Whether the Triton kernels are right and fast on the GPU at hand, in about five minutes.

    benchmarks/gpu_check.sh [--only attention,cache,ops,logits,sampling,ceilings,speed,flex,sampling_speed,tune,decode]
                            [--model tiny|1b|8b] [--budget SECONDS] [--seed N] [--quick] [--interpret]

attention, cache, ops, logits and sampling hold every kernel against float64, or against plain PyTorch where results
must be equal, on fresh random inputs in bfloat16, with outputs filled with NaN first: the relative error
``|out - expected| / |expected|`` must be at most 1e-2. ceilings measures the bandwidth of a copy and the rate of
bfloat16 matrix products, speed the attention kernels on shapes of models of 7 and 8 billion parameters beside PyTorch's
``scaled_dot_product_attention`` over contiguous keys, flex FlexAttention on one of them, tune what the search for tiles
gains, sampling_speed a step's draws over a vocabulary of 151,936. decode writes a model with random weights and decodes
with and without CUDA graphs: time of a step, and its share of the time that reading weights and keys would take.

Each part has its own time limit, and all together have ``--budget``. A part that fails or runs over is reported and
does not stop the others; the exit code is then 1. ``--interpret`` runs the kernels in Triton's interpreter on the CPU,
on tiny shapes with ``--quick``, which tests nothing but the script. With OUT set, results are also written to
``$OUT/gpu_check.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

#: part → module, function, and the seconds that it may take
PARTS: dict[str, tuple[str, str, int]] = {
    "attention": ("_gpu_correctness", "attention", 60),
    "cache": ("_gpu_correctness", "cache", 20),
    "ops": ("_gpu_correctness", "operations", 30),
    "logits": ("_gpu_correctness", "logits", 20),
    "sampling": ("_gpu_correctness", "sampling", 60),
    "ceilings": ("_gpu_speed", "ceilings", 20),
    "speed": ("_gpu_speed", "attention", 60),
    "sampling_speed": ("_gpu_speed", "sampling", 40),
    "decode": ("_gpu_decode", "decode", 120),
    "flex": ("_gpu_speed", "flex", 40),
    "tune": ("_gpu_speed", "tune", 60),
}


class OverTimeError(Exception):
    """A part has taken its time."""


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


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, of %(default)s")
    parser.add_argument("--model", default="1b", choices=["tiny", "1b", "8b"], help="size of the model that decodes")
    parser.add_argument("--budget", type=int, default=300, help="seconds for all parts together (default: 300)")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs; by default another one each time")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--interpret", action="store_true", help="run kernels in Triton's interpreter on the CPU")
    args = parser.parse_args(arguments)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: there are no parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, so before they are imported
    args.device = "cpu" if args.interpret else "cuda"
    args.seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    results: dict[str, Any] = {"seed": args.seed, "device": _device(args.device), "parts": {}}
    print(f"{results['device']}, seed {args.seed}")
    failed = []
    end = time.perf_counter() + args.budget
    for name in names:
        module, function, seconds = PARTS[name]
        part: Callable[[argparse.Namespace, dict[str, Any]], Any] = getattr(import_module(module), function)
        began = time.perf_counter()
        print(f"== {name}")
        outcome: dict[str, Any] = {"ok": True, "results": {}}
        results["parts"][name] = outcome
        try:
            # What a part has filled in before it fails is kept.
            with limited(min(seconds, math.ceil(end - time.perf_counter())) if not args.interpret else 10 * seconds):
                part(args, outcome["results"])
        except Exception as exc:  # noqa: BLE001 - reported, and the exit code says so
            traceback.print_exc(file=sys.stdout)
            failed.append(name)
            outcome |= {"ok": False, "error": f"{type(exc).__name__}: {exc}"}
        outcome["seconds"] = round(time.perf_counter() - began, 2)
        print(f"   {'ok' if outcome['ok'] else 'FAILED'} in {outcome['seconds']} s")
        if "OUT" in os.environ:
            (Path(os.environ["OUT"]) / "gpu_check.json").write_text(json.dumps(results, indent=1))
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return bool(failed)


def _device(device: str) -> str:
    import torch
    import triton

    name = "Triton's interpreter" if device == "cpu" else torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


if __name__ == "__main__":
    sys.exit(main())
