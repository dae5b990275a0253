"""What the prefix cache and its tiers save when conversations come back.

    python benchmarks/sessions.py MODEL [--parts turns,host,disk] [--sample 6] [--sessions 50] [--repeat 1]

turns: a conversation of 20 turns of 24 tokens with 4 tokens out. Without a cache each turn computes the whole
conversation; with it, what is new and at most a block more.

host: 50 sessions of about 1,000 tokens are visited one after the other, in a pool that holds a fifth of them; then each
is visited again with 20 further tokens and 2 tokens out. By then the pool has lost it: the ``offload`` tier brings it
back from host memory, an engine without a tier computes it anew. The two engines are processes that take turns, session
by session. As an evicted session costs the engine without a tier the same as one that it never saw, it makes no first
visits, and only every n-th later one (``--sample`` of them; 0: all), each time of other sessions.

disk: the engine with the tier is shut down, which writes what host memory holds to disk, and started anew; every
session is visited a third time, beside the other engine as before. The files lie in the operating system's page cache
unless it is short of memory, so this measures finding, checking and copying more than the disk.

Prints a JSON line per measurement and, last, tables. MODEL is a Hugging Face folder or a GGUF file of a model with at
least 150,000 token ids, such as a Qwen2.5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from driver import Engine
from workloads import sessions

_TURNS, _TURN_TOKENS, _TURN_OUT = 20, 24, 4
_LENGTH, _MORE, _OUT = 1000, 20, 2


def config(args: argparse.Namespace, num_blocks: int, **roles: Any) -> dict[str, Any]:
    """One pool size for all engines."""
    return {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": 1152,
        "plugins": {
            "cache": {"use": "paged", "block_size": args.block_size, "num_blocks": num_blocks},
            "scheduler": {"use": "continuous", "max_num_seqs": 8},
            **roles,
        },
    }


def turns(args: argparse.Namespace, seed: int) -> list[str]:
    """A conversation; returns rows of the table."""
    history: list[int] = []
    rows = []
    with Engine(config(args, 2 * 1152 // args.block_size)) as engine:
        for number, new in enumerate(sessions(seed, 1, _TURN_TOKENS, _TURNS - 1, _TURN_TOKENS)[0], 1):
            history += new
            work = [(list(history), _TURN_OUT)]
            run = engine.run(work)
            line = {
                "part": "turns",
                "turn": number,
                "prompt_tokens": len(history),
                "new_tokens": len(new),
                "computed_prompt_tokens": run.computed(work),
                "seconds": round(run.seconds, 3),
            }
            print(json.dumps(line), flush=True)
            rows.append(f"| {number} | {len(history)} | {len(new)} | {run.computed(work)} | {run.seconds:.2f} |")
            history += run.outputs[0]
    return rows


class Visits:
    """The second and third visits, with the tier and without it."""

    def __init__(self, args: argparse.Namespace, seed: int, folder: Path) -> None:
        self._args = args
        self._all = sessions(seed, args.sessions, _LENGTH, 2, _MORE)
        self._history: list[list[int]] = [[] for _ in self._all]
        blocks = 1 + args.sessions * (-(-_LENGTH // args.block_size) + 1) // 5
        tier = {"use": "offload", "host_memory": args.host_memory, "path": str(folder), "disk_memory": "4GiB"}
        self._plain, self._tiered = config(args, blocks), config(args, blocks, cache_tier=[tier])
        self._step = max(args.sessions // args.sample, 1) if args.sample else 1

    def measure(self) -> dict[str, dict[str, list[float]]]:
        """Seconds of every visit by part and engine."""
        parts = self._args.parts.split(",")
        figures: dict[str, dict[str, list[float]]] = {}
        with Engine(self._plain) as plain:
            with Engine(self._tiered) as tiered:
                first = [self._visit("first", 0, index, tiered, "tier") for index in range(len(self._all))]
                figures["first"] = {"tier": first, "none": []}
                if "host" in parts:
                    figures["host"] = self._again("host", 1, tiered, plain)
            if "disk" in parts:
                with Engine(self._tiered) as tiered:
                    figures["disk"] = self._again("disk", 2, tiered, plain)
        return figures

    def _again(self, part: str, turn: int, tiered: Engine, plain: Engine) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {"tier": [], "none": []}
        first = (turn - 1) * self._step // 2
        for index in range(len(self._all)):
            if index % self._step == first:
                # The same prompt, so before the other engine's answer is added to it.
                seconds["none"].append(self._visit(part, turn, index, plain, "none"))
            seconds["tier"].append(self._visit(part, turn, index, tiered, "tier"))
        return seconds

    def _visit(self, part: str, turn: int, index: int, engine: Engine, tier: str) -> float:
        prompt = self._history[index] + self._all[index][turn]
        work = [(prompt, _OUT)]
        run = engine.run(work)
        line = {
            "part": part,
            "session": index,
            "tier": tier,
            "prompt_tokens": len(prompt),
            "computed_prompt_tokens": run.computed(work),
            "tier_hits": run.tier_hits,
            "seconds": round(run.seconds, 3),
            "cpu_seconds": round(run.cpu_seconds, 3),
        }
        print(json.dumps(line), flush=True)
        if tier == "tier":
            self._history[index] = prompt + run.outputs[0]
        return run.seconds


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--parts", default="turns,host,disk")
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--sample", type=int, default=6, help="visits without a tier; 0: all of them")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--folder", help="where the files are written; by default a temporary folder")
    args = parser.parse_args()
    parts = args.parts.split(",")
    tables: list[str] = []
    if "turns" in parts:
        tables += ["| turn | prompt tokens | new | computed | seconds |", "|---|---|---|---|---|", *turns(args, 0), ""]
    if "host" in parts or "disk" in parts:
        gathered: dict[str, dict[str, list[float]]] = {}
        for seed in range(args.repeat):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                for part, engines in Visits(args, seed, Path(folder)).measure().items():
                    for engine, seconds in engines.items():
                        gathered.setdefault(part, {}).setdefault(engine, []).extend(seconds)
        tables += ["| visits | computed anew, s | from the tier, s | ratio |", "|---|---|---|---|"]
        for part in ("host", "disk"):
            if part in gathered:
                none, tier = (statistics.median(gathered[part][engine]) for engine in ("none", "tier"))
                tables.append(f"| {part} | {none:.3f} | {tier:.3f} | {none / tier:.1f} |")
        tables.append(
            f"\nFirst visits took {statistics.median(gathered['first']['tier']):.3f} s. All are medians per visit."
        )
    print("\n".join(tables))


if __name__ == "__main__":
    main()
