"""What the prefix cache saves: requests that share most of their prompt, with prefix caching on and off.

    python benchmarks/prefix.py MODEL [--repeat 2] [--dtype bfloat16]

16 requests share 1,024 tokens and have 32 of their own, 16 tokens out: together 16,896 prompt tokens, of which
1,024 + 16 * 32 = 1,536 are different. Each run has other tokens, so nothing is left of the one before. The two
engines are processes that take turns. Prints a JSON line per run and, last, a table of medians. MODEL is a Hugging Face
folder or a GGUF file of a model with at least 150,000 token ids, such as a Qwen2.5. CPU seconds are the engine's own,
which other work on the machine disturbs less; threads that spin count as work, so run with OMP_NUM_THREADS=1 for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from typing import Any

from driver import Engine
from workloads import WORKLOADS

_COLUMNS = ("computed_prompt_tokens", "seconds", "last_first_token_s", "decode_s", "cpu_s")


def config(args: argparse.Namespace, *, caching: bool) -> dict[str, Any]:
    """Equal but for prefix caching."""
    return {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": 2048,
        "plugins": {
            "cache": {"use": "paged", "memory": args.memory, "prefix_caching": caching},
            "scheduler": {"use": "continuous", "max_num_seqs": 32},
        },
    }


def main() -> None:
    """Start both engines, let them take turns, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", default="1GiB", help="memory for the KV cache of each engine")
    args = parser.parse_args()
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with Engine(config(args, caching=True)) as on, Engine(config(args, caching=False)) as off:
        for seed in range(args.repeat):
            work = WORKLOADS["prefix"](seed)
            for name, engine in (("on", on), ("off", off)):
                run = engine.run(work)
                line: dict[str, Any] = {
                    "prefix_caching": name,
                    "seed": seed,
                    "prompt_tokens": sum(len(prompt) for prompt, _ in work),
                    "computed_prompt_tokens": run.computed(work),
                    "seconds": round(run.seconds, 2),
                    "last_first_token_s": round(run.last_first_token, 2),
                    "decode_s": round(run.seconds - run.last_first_token, 2),
                    "cpu_s": round(run.cpu_seconds, 2),
                }
                print(json.dumps(line), flush=True)
                for column in _COLUMNS:
                    figures[name, column].append(line[column])
    print(
        "| prefix caching | computed prompt tokens | seconds | until the last first token | after that | CPU seconds |"
    )
    print("|---|---|---|---|---|---|")
    medians = {key: statistics.median(values) for key, values in figures.items()}
    for name in ("on", "off"):
        print(f"| {name} | " + " | ".join(f"{medians[name, column]:g}" for column in _COLUMNS) + " |")
    ratios = [medians["off", column] / max(medians["on", column], 1e-9) for column in _COLUMNS]
    print("| off / on | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


if __name__ == "__main__":
    main()
