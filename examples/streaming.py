"""Stream several answers at once: ``python examples/streaming.py [MODEL]``; see ``offline.py`` for the models."""

from __future__ import annotations

import asyncio
import sys

from trivet import AsyncEngine, SamplingParams

PROMPTS = ["Water boils at", "The three primary colours are", "To make a cup of tea,"]


async def stream(engine: AsyncEngine, prompt: str) -> None:
    """Print each piece of the answer as it comes."""
    params = SamplingParams(temperature=0, max_tokens=24, output_kind="delta")
    async for output in engine.generate(prompt, params):
        print(f"{prompt} … {output.outputs[0].text!r}")


async def first_words(engine: AsyncEngine, prompt: str) -> None:
    """Stop listening after a few words: leaving the loop aborts the request."""
    text = ""
    async for output in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=500)):
        text = output.outputs[0].text
        if len(text.split()) >= 5:
            break
    print(f"{prompt} … {text!r} is enough")


async def main() -> None:
    """Serve all prompts concurrently from one engine."""
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    async with AsyncEngine({"model": model, "dtype": "float32", "max_model_len": 1024}) as engine:
        await asyncio.gather(*(stream(engine, prompt) for prompt in PROMPTS), first_words(engine, "Once upon a time"))


if __name__ == "__main__":
    asyncio.run(main())
