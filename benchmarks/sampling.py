"""What each sampling parameter costs in a step, beside taking the likeliest token.

    python benchmarks/sampling.py [--model FOLDER] [--rows 1,8,32,128] [--rounds 20] [--cases NAME,...]

The sampler draws from bfloat16 logits: those that a model (a folder with a checkpoint that transformers reads) has for
the positions of a text, or without one from made-up ones of a like shape. Every request of a batch has the parameters
of its case, a prompt of 200 tokens and 100 outputs. The cases take turns, and in each turn draw another position;
figures are the least and the median of the rounds in milliseconds for the whole batch, Python included. With a model
the engine's greedy step of so many rows is measured too, and ``share`` is the least time less that of ``greedy`` in it.

Prints a JSON line per case and number of rows. The number of threads is OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trivet.plan import NewRequest, Ragged
from trivet.roles import SampleRows
from trivet_sampler.sampler import TorchSampler
from trivet_schemas.sampling import SamplingParams

PROMPT, OUTPUT, VOCAB, STEP_TOKENS = 200, 100, 151_936, 24
ALL: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 200,
    "min_p": 0.001,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "logit_bias": {7: 1.0},
    "min_tokens": 1000,
    "stop_token_ids": [5],
    "bad_words": ["x"],
    "logprobs": 20,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_p_hot": {"temperature": 1.5, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "logit_bias": {"temperature": 0.0, "logit_bias": {7: 1.0, 9: -100.0}},
    "bad_words": {"temperature": 0.0, "bad_words": ["x"]},
    "allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": list(range(0, 100_000, 3))},
    "min_tokens": {"temperature": 0.0, "min_tokens": 1000, "stop_token_ids": [5]},
    "logprobs_20": {"temperature": 0.0, "logprobs": 20},
    "all": ALL,
}
TEXT = "The quick brown fox jumps over the lazy dog while 12 engineers measure, for the third time, how long it takes. "


class Batch:
    """A sampler with ``rows`` requests that have one case's parameters; in a ``mixed`` one only the first has them."""

    def __init__(self, params: dict[str, Any], rows: int, vocab_size: int, *, mixed: bool = False) -> None:
        rng = np.random.default_rng(rows)
        self._sampler = TorchSampler()
        self._sampler.bind(vocab_size, vocab_size - 271, rows, [])
        self._tokens = rng.zipf(1.3, (rows, PROMPT + OUTPUT + 10_000)).clip(max=vocab_size - 1).astype(np.int32)
        self._lengths = np.full(rows, PROMPT + OUTPUT, np.int32)
        self._rows = rows
        for slot in range(rows):
            given = SamplingParams(max_tokens=None, **(params if slot == 0 or not mixed else CASES["greedy"]))
            self._sampler.add(
                NewRequest(
                    str(slot),
                    slot,
                    1,
                    self._tokens[slot, : PROMPT + OUTPUT],
                    PROMPT,
                    0,
                    [],
                    params=given,
                    seed=slot,
                    stop_ids=np.array(given.stop_token_ids, np.int32),
                    bad_words=Ragged.from_rows([[11], [12, 13], [3, 4, 5]]) if given.bad_words else None,
                )
            )

    def step(self, logits: Tensor) -> float:
        """Seconds that a step takes."""
        rows = np.arange(self._rows, dtype=np.int32)
        batch = SampleRows(
            plan_rows=rows,
            slots=rows,
            starts=np.arange(self._rows + 1, dtype=np.int32),
            positions=self._lengths - PROMPT,
            row_slots=rows,
            drafts=Ragged.empty(self._rows),
            draft_parents=None,
            tokens=self._tokens,
            lengths=self._lengths,
        )
        started = time.perf_counter()
        sampled = self._sampler.sample(logits, batch)
        elapsed = time.perf_counter() - started
        if sampled.errors:
            raise RuntimeError(sampled.errors[0].message)
        self._lengths = self._lengths + 1
        return elapsed


def model_logits(folder: Path, rows: int) -> Tensor:
    """``[rows, vocab_size]`` bfloat16 logits of a model for positions of a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    text = Path(__file__).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : 4 * rows + 8]
    with torch.inference_mode():
        hidden = model.model(ids).last_hidden_state[0, -4 * rows :: 4]
        logits: Tensor = model.lm_head(hidden)
    return logits.bfloat16().contiguous()


def made_up_logits(rows: int) -> Tensor:
    """Logits whose nucleus has a few to some hundred tokens, as a language model's."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, VOCAB, generator=generator) * 2.2
    places = torch.randint(0, VOCAB, (rows, 200), generator=generator)
    logits.scatter_(1, places, torch.linspace(8, 18, 200).expand(rows, -1))
    return logits.bfloat16()


def step_times(folder: Path, rows: Sequence[int]) -> dict[int, float]:
    """Milliseconds of a greedy step of the engine, by number of rows."""
    from trivet import LLM

    llm = LLM(str(folder), max_model_len=512, max_num_seqs=max(rows))
    found = {}
    for count in rows:
        prompts = [f"{index}. {TEXT}" for index in range(count)]
        seconds = []
        for length in (2, 2 + STEP_TOKENS) * 2:
            started = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=length, temperature=0, ignore_eos=True), use_tqdm=False)
            seconds.append(time.perf_counter() - started)
        found[count] = 1e3 * (min(seconds[1::2]) - min(seconds[::2])) / STEP_TOKENS
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a checkpoint")
    parser.add_argument("--rows", default="1,8,32,128", help="sizes of batches")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cases", help=f"some of {','.join(CASES)} and, with one row of many, one_penalty")
    args = parser.parse_args()
    sizes = [int(size) for size in args.rows.split(",")]
    logits = model_logits(args.model, max(sizes)) if args.model else made_up_logits(max(sizes))
    steps = step_times(args.model, sizes) if args.model else {}
    names = args.cases.split(",") if args.cases else [*CASES, "one_penalty"]
    for rows in sizes:
        batches = {
            name: Batch(CASES.get(name, CASES["penalties"]), rows, logits.shape[1], mixed=name not in CASES)
            for name in dict.fromkeys(["greedy", *names])
        }
        times: dict[str, list[float]] = {name: [] for name in batches}
        for _ in range(args.rounds):
            for name, batch in batches.items():
                times[name].append(1e3 * batch.step(logits[:rows]))
        for name, found in times.items():
            line: dict[str, Any] = {"case": name, "rows": rows, "threads": torch.get_num_threads()}
            line |= {"least_ms": round(min(found), 3), "median_ms": round(statistics.median(found), 3)}
            if rows in steps:
                line["step_ms"] = round(steps[rows], 1)
                line["share"] = round((min(found) - min(times["greedy"])) / steps[rows], 4)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
