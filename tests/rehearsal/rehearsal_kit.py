"""Engines on the fake model whose worker is another process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pipe

from trivet.engine import Engine
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_schemas.sampling import SamplingParams


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(64) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def greedy(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, **fields)


@contextmanager
def engine(
    *plugins: Any, model: dict[str, Any] | None = None, max_model_len: int = 96, depth: int = 1, **roles: Any
) -> Iterator[Engine]:
    """An engine whose roles are the fakes, with the given ones in their place."""
    fake: dict[str, Any] = {role: {"use": "fake"} for role in ("attention", "sampler", "runner", "tokenizer")}
    config = {
        "model": "fake",
        "max_model_len": max_model_len,
        "plugins": fake
        | {
            "model": {"use": "fake"} | (model or {}),
            "executor": {"use": "pipe", "depth": depth},
            "cache": {"use": "paged", "block_size": 4},
            "scheduler": {"use": "continuous", "max_num_batched_tokens": 32, "max_num_seqs": 8},
        }
        | roles,
    }
    e = Engine(config, [fakes, pipe, *plugins])
    try:
        yield e
        while e.has_work:
            e.step()
        assert e.fault is None
        e.check_integrity()
        e.parts.cache.reset()
        stats = e.parts.cache.stats()
        assert stats.free == stats.total, f"blocks are in use after the drain: {stats}"
    finally:
        e.shutdown()


def run(e: Engine, steps: int = 5000) -> dict[str, Any]:
    """Step until everything has ended; the ended requests by id. Checks the state after every step."""
    done: dict[str, Any] = {}
    while e.has_work:
        for end in e.step().finished:
            done[end.request.request_id] = end.request
        e.check_integrity()
        steps -= 1
        assert steps, "no end in sight"
    return done


def expect(done: dict[str, Any], work: dict[str, tuple[list[int], int]], **model: Any) -> None:
    """Every request ended by length with the reference's tokens."""
    for request_id, (prompt, count) in work.items():
        assert done[request_id].finish_reason == "length", done[request_id].message
        assert done[request_id].output_ids == reference_tokens(prompt, count, **model), request_id
