"""Inter-token latency of running streams while long prompts arrive, with and without limits to mixed steps.

    python benchmarks/latency_mix.py MODEL [--cases static,adaptive,none] [--streams 8] [--prompts 2] [--plot FILE.svg]

A case is an engine. Its streams generate alone for ``--steps`` steps (undisturbed); then ``--prompts`` prompts of
``--length`` tokens arrive, each when the one before has its first token (disturbed). The latency between two tokens of
a stream is measured where the engine hands them out.

- ``static``: ``max_num_mixed_prefill_tokens`` = ``--mixed``;
- ``adaptive``: ``target_inter_token_latency`` = ``--factor`` times the undisturbed median of the first case;
- ``none``: a prompt is computed as soon as it arrives, in one step if the token budget allows it.

Prints a JSON line per case: latencies in milliseconds, ``ratio_p99`` of disturbed over undisturbed, and how long a
prompt took to its first token. ``--overlap`` adds a line on the option ``async_scheduling``: undisturbed engines with
and without it take turns. MODEL is a Hugging Face folder or a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

_PROMPT, _WARM = 32, 20  # tokens of a stream's prompt, steps before anything is measured
_ROUNDS, _ROUND = 6, 25  # of the comparison with overlapped steps


class Streams:
    """An engine with streams that generate."""

    def __init__(self, args: argparse.Namespace, *, overlap: bool = False, **options: Any) -> None:
        from trivet.engine import Engine

        plugins = {
            "scheduler": {"use": "continuous", "max_num_seqs": args.streams + 1, **options},
            "executor": {"use": "inline", "async_scheduling": overlap},
        }
        config = {"model": args.model, "dtype": args.dtype, "max_model_len": args.length + 64, "plugins": plugins}
        self.engine = Engine(config)
        self._length = args.length
        self._rng = random.Random(args.seed)
        self._streams = [self._add(f"stream-{number}", _PROMPT, args.length) for number in range(args.streams)]
        self._last = [time.perf_counter()] * args.streams
        self.run(_WARM)

    def _add(self, name: str, length: int, count: int) -> Any:
        from trivet_schemas.sampling import SamplingParams

        ids = min(self.engine.model.vocab_size, 150_000)
        prompt = [self._rng.randrange(min(100, ids // 2), ids) for _ in range(length)]
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        return self.engine.add_request(name, prompt, params)

    def run(self, steps: int) -> list[float]:
        """Seconds between tokens of all streams, over some steps."""
        gaps: list[float] = []
        for _ in range(steps):
            self._step(gaps)
        return gaps

    def _step(self, gaps: list[float]) -> None:
        count = self.engine.table.num_output
        before = [count(stream) for stream in self._streams]
        self.engine.step()
        now = time.perf_counter()
        for number, (stream, had) in enumerate(zip(self._streams, before, strict=True)):
            if count(stream) > had:
                gaps.append(now - self._last[number])
                self._last[number] = now

    def disturb(self, prompts: int) -> tuple[list[float], list[float]]:
        """Latencies while prompts arrive, and how long each took to its first token."""
        gaps: list[float] = []
        waits: list[float] = []
        for number in range(prompts):
            start = time.perf_counter()
            request = self._add(f"prompt-{number}", self._length, 1)
            while request.finish_reason is None:
                self._step(gaps)
            waits.append(time.perf_counter() - start)
        return gaps, waits

    def close(self) -> None:
        """Shut the engine down."""
        self.engine.shutdown()


def milliseconds(gaps: list[float]) -> dict[str, float]:
    """p50, p99 and the largest."""
    values = np.array(gaps) * 1e3
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1), "max": round(float(values.max()), 1)}


def measure(args: argparse.Namespace) -> dict[str, tuple[list[float], list[float]]]:
    """Latencies by case, undisturbed and disturbed; prints a line per case."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    target = 0.0
    for case in args.cases.split(","):
        budget = args.length + args.streams
        options: dict[str, Any] = {"max_num_batched_tokens": budget}
        if case == "static":
            options["max_num_mixed_prefill_tokens"] = args.mixed
        if case == "adaptive":
            if not target:
                streams = Streams(args, **options)
                target = args.factor * float(np.median(streams.run(args.steps)))
                streams.close()
            options["target_inter_token_latency"] = target
        streams = Streams(args, **options)
        try:
            alone = streams.run(args.steps)
            target = target or args.factor * float(np.median(alone))
            gaps, waits = streams.disturb(args.prompts)
        finally:
            streams.close()
        found[case] = alone, gaps
        quiet, busy = milliseconds(alone), milliseconds(gaps)
        line = {
            "case": case,
            **{name: value for name, value in options.items() if name != "max_num_batched_tokens"},
            "undisturbed_ms": quiet,
            "disturbed_ms": busy,
            "ratio_p99": round(busy["p99"] / quiet["p99"], 2),
            "first_token_s": round(float(np.mean(waits)), 2),
        }
        print(json.dumps(line), flush=True)
    return found


def overlap(args: argparse.Namespace) -> None:
    """Undisturbed latency with and without overlapped steps, in turns."""
    engines = {name: Streams(args, overlap=name == "overlapped") for name in ("in_turn", "overlapped")}
    gaps: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(_ROUNDS):
        for name, streams in engines.items():
            streams.run(2)  # the first gap is the other engine's turn
            gaps[name] += streams.run(_ROUND)
    for streams in engines.values():
        streams.close()
    line = {"case": "overlap", **{f"{name}_ms": milliseconds(values) for name, values in gaps.items()}}
    medians = {name: float(np.median(values)) for name, values in gaps.items()}
    print(json.dumps(line | {"speedup": round(medians["in_turn"] / medians["overlapped"], 3)}), flush=True)


def plot(found: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    """Share of latencies above each value, per case. Writes ``path``."""
    from trivet.bench.plots import new_figure

    figure = new_figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for number, (case, (alone, gaps)) in enumerate(found.items()):
        for values, style, label in ((alone, ":", "alone"), (gaps, "-", "while prompts arrive")):
            ordered = np.sort(np.array(values) * 1e3)
            above = 1 - np.arange(len(ordered)) / len(ordered)
            axes.plot(ordered, above, style, color=f"C{number}", label=f"{case}, {label}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("inter-token latency (ms)")
    axes.set_ylabel("share of tokens that took longer")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run the cases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cases", default="static,adaptive,none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--mixed", type=int, default=16)
    parser.add_argument("--factor", type=float, default=1.6)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.plot is not None:
        from trivet.bench.plots import check_plot

        check_plot(args.plot)
    found = measure(args)
    if args.overlap:
        overlap(args)
    if args.plot is not None:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
