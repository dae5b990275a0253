"""Offline generation, Trivet beside transformers, on token ids with EOS ignored and bfloat16 weights.

    python benchmarks/offline.py MODEL [--engines trivet,transformers] [--workloads mixed,single,long] [--repeat 2]

Each engine runs in a process of its own; the engines take turns run by run (A B A B ...), the other one idle, because
only ratios taken in one go count on a machine that drifts. Prints a JSON line per run and, last, a table of medians.
MODEL is a Hugging Face folder of a model with at least 150,000 token ids, such as a Qwen2.5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

from workloads import WORKLOADS, Work


def load_trivet(model: str) -> Any:
    """Trivet as its users call it."""
    from trivet import LLM, SamplingParams

    llm = LLM(model=model, dtype="bfloat16", max_model_len=4096, max_num_seqs=64)

    def run(work: Work) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in work]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    return run


def load_transformers(model: str) -> Any:
    """One padded static batch."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(work: Work) -> int:
        width, longest = max(len(ids) for ids, _ in work), max(n for _, n in work)
        ids = torch.zeros(len(work), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(work):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            network.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            )
        return sum(n for _, n in work)

    return run


LOADERS = {"trivet": load_trivet, "transformers": load_transformers}


def serve(engine: str, model: str) -> None:
    """A process with one engine: runs the workload named on each line of standard input."""
    start = time.perf_counter()
    run = LOADERS[engine](model)
    print(json.dumps({"engine": engine, "startup_s": round(time.perf_counter() - start, 2)}), flush=True)
    for line in sys.stdin:
        name, seed = line.split()
        work = WORKLOADS[name](int(seed))
        start = time.perf_counter()
        produced = run(work)
        seconds = time.perf_counter() - start
        prompt = sum(len(ids) for ids, _ in work)
        figures = {
            "engine": engine,
            "workload": name,
            "seconds": round(seconds, 2),
            "output_tokens_per_s": round(produced / seconds, 2),
            "total_tokens_per_s": round((produced + prompt) / seconds, 2),
        }
        print(json.dumps(figures), flush=True)


def main() -> None:
    """Start the engines, let them take turns, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engines", default="trivet,transformers")
    parser.add_argument("--workloads", default="mixed,single,long")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--serve", choices=LOADERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.serve:
        serve(args.serve, args.model)
        return
    engines = args.engines.split(",")
    processes = {}
    for engine in engines:
        command = [sys.executable, __file__, args.model, "--serve", engine]
        processes[engine] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(processes[engine].stdout.readline(), end="", flush=True)  # type: ignore[union-attr]
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name in args.workloads.split(","):
        for seed in range(args.repeat):
            for engine, process in processes.items():
                print(name, seed, file=process.stdin, flush=True)
                line = process.stdout.readline()  # type: ignore[union-attr]
                print(line, end="", flush=True)
                result = json.loads(line)
                key = "total_tokens_per_s" if name == "long" else "output_tokens_per_s"
                figures[name, engine].append(result[key])
    for process in processes.values():
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()
    print("| workload | " + " | ".join(engines) + " |")
    print("|---" * (1 + len(engines)) + "|")
    for name in args.workloads.split(","):
        medians = [f"{statistics.median(figures[name, engine]):.1f}" for engine in engines]
        unit = "total/s" if name == "long" else "out/s"
        print(f"| {name}, {unit} | " + " | ".join(medians) + " |")


if __name__ == "__main__":
    main()
