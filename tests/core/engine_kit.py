"""Engines on the numpy fakes, in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trivet.engine import Engine
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_schemas.sampling import SamplingParams

FAKE: dict[str, Any] = {role: {"use": "fake"} for role in ("model", "attention", "sampler", "runner", "tokenizer")}


def greedy(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, **fields)


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(64) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def config(*, max_model_len: int | None = 96, **roles: Any) -> dict[str, Any]:
    plugins = FAKE | {
        "executor": {"use": "inline"},
        "cache": {"use": "paged", "block_size": 4},
        "scheduler": {"use": "continuous", "max_num_batched_tokens": 32, "max_num_seqs": 8},
    }
    return {"model": "fake", "max_model_len": max_model_len, "plugins": plugins | roles}


@contextmanager
def engine(*plugins: Any, **settings: Any) -> Iterator[Engine]:
    e = Engine(config(**settings), [fakes, *plugins])
    try:
        yield e
    finally:
        e.shutdown()


def drain(e: Engine, steps: int = 5000, check: bool = True) -> dict[str, Any]:
    """Step until everything has ended; ended requests by id."""
    done: dict[str, Any] = {}
    while e.has_work:
        for end in e.step().finished:
            done[end.request.request_id] = end.request
        if check:
            e.check_integrity()
        steps -= 1
        assert steps, "no end in sight"
    return done


def check_free(e: Engine) -> None:
    """No block is in use once the engine has drained."""
    stats = e.parts.cache.stats()
    assert stats.free == stats.total, stats


def expect(done: dict[str, Any], work: dict[str, tuple[list[int], int]]) -> None:
    for request_id, (prompt, count) in work.items():
        assert done[request_id].finish_reason == "length", done[request_id].message
        assert done[request_id].output_ids == reference_tokens(prompt, count), request_id
