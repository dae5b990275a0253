"""Offline generation from Python: ``python examples/offline.py [MODEL]``; the demo model unless another is named."""

from __future__ import annotations

import sys

from trivet import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "The first ten prime numbers are 2, 3, 5,"]


def main(model: str = "demo") -> None:
    """Generate greedily and with a seed, and show why each output ended."""
    with LLM(model, dtype="float32", max_model_len=512, max_num_seqs=8) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24)
        # Seeded requests give the same tokens in any batch.
        sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
        for params in (greedy, sampled):
            for output in llm.generate(PROMPTS, params):
                completion = output.outputs[0]
                print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
