"""Trivet beside other engines on the same work, taking turns, since only ratios taken in one go count.

    python benchmarks/peers.py MODEL [--python vllm=/path/to/python] [--python openvino=/path/to/python] ...
        [--engines trivet,vllm,openvino] [--model openvino=/path/to/ir] [--workloads mixed,single,decode,long,prefix]
        [--repeat 3] [--top-p] [--prefix-caching] [--quantization int8] [--bound] [--json FILE]

Engines: ``trivet``, ``vllm``, ``openvino`` (openvino-genai), ``hf`` (transformers, one padded batch at a time) and
``llama`` (llama-cpp-python, one request at a time). By default those run that this Python can import or that
``--python`` gives a Python for, but hf and llama only if they are named. MODEL is a Hugging Face folder;
``--model ENGINE=PATH`` gives an engine the same model in its own format: openvino wants a folder that optimum-intel
exported, llama a GGUF file.

Every engine gets the same token ids and output lengths, bfloat16 weights unless told otherwise, the end of sequence
ignored, and all cores. It has a process of its own, with a pipe; whoever is not at work is stopped (SIGSTOP), so that
no idle engine takes a core. In each repetition every engine runs each workload once, with prompts of that repetition;
tables show medians, and the ratio of the first engine to each other one with the range of the ratios of single
repetitions. Start-up is from the launch of the process until it takes requests; memory is the most that its processes
held. With ``--bound`` it is followed, engines still stopped, by what kernels.py computes that the model's matrix
products alone would allow on this machine.

Leave OMP_NUM_THREADS and the like alone and the machine to it: any other load ruins these figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, Work

_MODULES = {
    "trivet": "trivet",
    "vllm": "vllm",
    "openvino": "openvino_genai",
    "hf": "transformers",
    "llama": "llama_cpp",
}
_BY_DEFAULT = ("trivet", "vllm", "openvino")
# Workloads that are about prompts: their figure counts prompt tokens too.
_PROMPT_BOUND = {"long", "prefix"}
_QUIT_SECONDS = 30
_WARM_UP: Work = [(list(range(1000, 1064)), 4)]


class Peer:
    """An engine's process, from this side; stopped whenever it has nothing to do. Raises SystemExit when it fails."""

    def __init__(self, name: str, kind: str, python: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        server = Path(__file__).with_name("peer_engines.py")
        environment = {"HF_HUB_OFFLINE": "1"} | os.environ
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [python, str(server), kind, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # so that all its processes can be stopped together
        )
        try:
            self.load_seconds = float(self._answer()["load_s"])
            self.startup_seconds = time.perf_counter() - begin
            self.peak_bytes = self._measure_memory()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, work: Work) -> float:
        """Run requests together; returns seconds."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        print(json.dumps(work), file=self._process.stdin, flush=True)
        answer = self._answer()
        wanted = [count for _, count in work]
        if answer["counts"] != wanted:
            raise SystemExit(f"{self.name}: outputs of {answer['counts']} tokens were made in place of {wanted}")
        self.peak_bytes = max(self.peak_bytes, self._measure_memory())
        self._signal(signal.SIGSTOP)
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _measure_memory(self) -> int:
        """Bytes: the sum of what the processes of the session held at most, each for itself; 0 where it is unknown."""
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                status = (folder / "status").read_text()
            except (OSError, ValueError):
                continue  # it has ended meanwhile
            if session == self._process.pid and "VmHWM:" in status:
                total += 1024 * int(status.partition("VmHWM:")[2].split()[0])
        return total

    def close(self) -> None:
        """End the process and those it has started."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_QUIT_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"{self.name} did not end by itself", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):  # all have ended
            self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it died with work unread
                pipe.close()


Measured = dict[str, dict[str, list[float]]]
"""Workload → engine → tokens per second, one per repetition."""


def measure(peers: Sequence[Peer], workloads: Sequence[str], repeat: int) -> Measured:
    """Let the engines take turns: A B C, A B C, ... on each workload."""
    rates: Measured = {name: {peer.name: [] for peer in peers} for name in workloads}
    for seed in range(repeat):
        for name in workloads:
            work = WORKLOADS[name](seed)
            for peer in peers:
                rate = counted_tokens(name, work) / peer.run(work)
                rates[name][peer.name].append(rate)
                print(f"{seed + 1}/{repeat} {name:8} {peer.name:12} {rate:10.2f} tokens/s", file=sys.stderr, flush=True)
    return rates


def counted_tokens(name: str, work: Work) -> int:
    """Tokens that the figure of a workload counts."""
    return sum(count + (len(prompt) if name in _PROMPT_BOUND else 0) for prompt, count in work)


def summarise(rates: Measured) -> dict[str, dict[str, Any]]:
    """Workload → medians by engine, and the first engine's ratio to each other one: ``{ratio, lowest, highest}``."""
    summary: dict[str, dict[str, Any]] = {}
    for workload, by_engine in rates.items():
        medians = {name: statistics.median(values) for name, values in by_engine.items()}
        first, *others = by_engine
        ratios = {}
        for other in others:
            single = [mine / theirs for mine, theirs in zip(by_engine[first], by_engine[other], strict=True)]
            ratios[other] = {
                "ratio": medians[first] / medians[other],
                "lowest": min(single),
                "highest": max(single),
            }
        summary[workload] = {
            "counts": "prompt + output" if workload in _PROMPT_BOUND else "output",
            "tokens_per_s": medians,
            "ratios": ratios,
        }
    return summary


def tables(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown."""
    names = list(report["engines"])
    first, *others = names
    allowed = report.get("bound", {})
    heads = [*names, *(f"{first} / {other}" for other in others), *(["bound", f"{first} / bound"] if allowed else [])]
    yield f"| tokens/s | counts | {' | '.join(heads)} |"
    yield f"|---|---|{'---|' * len(heads)}"
    for workload, found in report["workloads"].items():
        cells = [f"{found['tokens_per_s'][name]:.1f}" for name in names]
        for other in others:
            ratio = found["ratios"][other]
            cells.append(f"**{ratio['ratio']:.2f}** ({ratio['lowest']:.2f} to {ratio['highest']:.2f})")
        if allowed:
            share = found["tokens_per_s"][first] / allowed[workload]
            cells += [f"{allowed[workload]:.1f}", f"{share:.2f}"]
        yield f"| {workload} | {found['counts']} | {' | '.join(cells)} |"
    yield ""
    yield "| engine | start-up, s | of that loading, s | peak memory, MiB |"
    yield "|---|---|---|---|"
    for name, engine in report["engines"].items():
        memory = engine["peak_bytes"] / 2**20
        yield f"| {name} | {engine['startup_s']:.1f} | {engine['load_s']:.1f} | {memory:.0f} |"


def measure_bound(model: str, dtype: str, workloads: Sequence[str]) -> dict[str, float]:
    """Workload → tokens per second that the model's matrix products alone would allow; prints what it measures."""
    program = Path(__file__).with_name("kernels.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bound.json"
        options = ["--workload", ",".join(workloads), "--dtype", dtype, "--json", str(path)]
        done = subprocess.run([sys.executable, str(program), "bound", model, *options], stdout=sys.stderr, check=False)
        if done.returncode:
            raise SystemExit(f"--bound: {program.name} ended with code {done.returncode}; its error is above")
        found: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))["bound"]
    keys = {name: "total_tokens_per_s" if name in _PROMPT_BOUND else "output_tokens_per_s" for name in workloads}
    return {name: found[name][key] for name, key in keys.items()}


def pairs(option: str, values: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping; refuses names of no engine."""
    found = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or name not in _MODULES:
            raise SystemExit(f"{option}: {text!r} must look like ENGINE=PATH, ENGINE one of {', '.join(_MODULES)}")
        found[name] = value
    return found


def choose(asked: str | None, pythons: Mapping[str, str]) -> list[str]:
    """The engines to run: those that were asked for, or those that can be had."""
    if asked is None:
        here = [name for name in _BY_DEFAULT if importlib.util.find_spec(_MODULES[name]) is not None]
        return [name for name in _MODULES if name in pythons or name in here]
    names = [name.strip() for name in asked.split(",") if name.strip()]
    for name in names:
        if name not in _MODULES:
            raise SystemExit(f"--engines: {name!r} is none of {', '.join(_MODULES)}")
        if name not in pythons and importlib.util.find_spec(_MODULES[name]) is None:
            raise SystemExit(
                f"--engines: {name} is not installed here; give --python {name}=PATH of a Python that has it"
            )
    return names


def settings_of(kind: str, args: argparse.Namespace, models: Mapping[str, str]) -> dict[str, Any]:
    """What an engine is started with."""
    return {
        "model": models.get(kind, args.model_path),
        "dtype": args.dtype,
        "top_p": args.top_p,
        "prefix_caching": args.prefix_caching,
        "options": dict(text.partition("=")[::2] for text in args.set) if kind == "trivet" else {},
    }


def variants(kinds: Sequence[str], quantizations: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """``(name, kind, extra settings)``: Trivet once for each quantization, the others as they are."""
    for kind in kinds:
        for quantization in quantizations if kind == "trivet" else ("none",):
            if quantization == "none":
                yield kind, kind, {}
            else:
                yield f"{kind}-{quantization}", kind, {"quantization": quantization}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_path", metavar="MODEL")
    parser.add_argument("--engines", help="by commas; the first is compared with the others")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--model", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--workloads", default="mixed,single,decode,long")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--top-p", action="store_true", help="temperature 0.8 and top_p 0.95 in place of greedy")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--quantization", default="none", help="of Trivet; several by commas: none,int8")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="flat argument of Trivet")
    parser.add_argument("--bound", action="store_true", help="also what the matrix products alone allow")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.workloads.split(",") if name not in WORKLOADS]
    if unknown:
        parser.error(f"--workloads: {', '.join(unknown)} is none of {', '.join(WORKLOADS)}")
    if args.repeat < 1:
        parser.error("--repeat: must be at least 1")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the engines, let them take turns, and print tables."""
    args = parse(arguments)
    pythons, models = pairs("--python", args.python), pairs("--model", args.model)
    kinds = choose(args.engines, pythons)
    if not kinds:
        raise SystemExit("no engine is installed here; give --python ENGINE=PATH")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no engine stays behind, stopped
    peers: list[Peer] = []
    try:
        for name, kind, extra in variants(kinds, args.quantization.split(",")):
            print(f"starting {name}", file=sys.stderr, flush=True)
            settings = settings_of(kind, args, models) | extra
            peers.append(Peer(name, kind, pythons.get(kind, sys.executable), settings))
        for peer in peers:
            peer.run(_WARM_UP)
        workloads = args.workloads.split(",")
        rates = measure(peers, workloads, args.repeat)
        allowed = {"bound": measure_bound(args.model_path, args.dtype, workloads)} if args.bound else {}
    finally:
        for peer in peers:
            peer.close()
    report = {
        "model": args.model_path,
        "repeat": args.repeat,
        "top_p": args.top_p,
        "prefix_caching": args.prefix_caching,
        "engines": {
            peer.name: {
                "startup_s": round(peer.startup_seconds, 2),
                "load_s": round(peer.load_seconds, 2),
                "peak_bytes": peer.peak_bytes,
            }
            for peer in peers
        },
        "workloads": summarise(rates),
        **allowed,
        "runs": rates,
    }
    print("\n".join(tables(report)))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
