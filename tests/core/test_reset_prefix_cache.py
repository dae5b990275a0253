"""What the cache keeps of earlier requests can be forgotten, while nothing runs."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_kit import engine

from trivet import LLM, AsyncEngine, SamplingParams

PROMPT = {"prompt_token_ids": list(range(1, 42))}
CACHE = {"use": "paged", "block_size": 4}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def test_llm_forgets() -> None:
    with engine(cache=CACHE) as e:
        llm = LLM.from_engine(e)
        cached = []
        for reset in (False, True, False):
            cached.append(llm.generate(PROMPT, greedy(3), use_tqdm=False)[0].num_cached_tokens)
            if reset:
                assert llm.reset_prefix_cache()
        cached.append(llm.generate(PROMPT, greedy(3), use_tqdm=False)[0].num_cached_tokens)
        assert cached == [0, 40, 0, 40]


def test_async_engine_refuses_while_requests_run() -> None:
    async def run(e: Any) -> None:
        async with AsyncEngine.from_engine(e) as client:
            stream = client.generate(PROMPT, greedy(50), request_id="a")
            await anext(stream)
            assert not await client.reset_prefix_cache()
            async for _ in stream:
                pass
            assert await client.reset_prefix_cache()
            outputs = [output async for output in client.generate(PROMPT, greedy(1), request_id="b")]
            assert outputs[-1].num_cached_tokens == 0

    with engine(cache=CACHE) as e:
        asyncio.run(run(e))
