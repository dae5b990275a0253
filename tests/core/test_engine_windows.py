"""Fake models whose layers see windows and chunks, over groups with tables of their own in one pool."""

from __future__ import annotations

import random
from typing import Any

import machine_kit as kit
import pytest
from engine_kit import FAKE, check_free, drain, engine, greedy

from trivet.testing.fake_model import reference_states, reference_tokens

MODELS: dict[str, tuple[list[int | None], list[bool]]] = {
    "chunks": ([6], [True]),
    "chunks and all": ([8, None, 8, 8], [True, False, True, True]),
    "chunks and windows": ([8, 8, 5], [True]),
}


def work(seed: int) -> list[list[int]]:
    """Prompts of up to 38 tokens, many of which begin alike."""
    rng = random.Random(seed)
    head = [rng.randrange(64) for _ in range(30)]
    return [head[: rng.randint(1, 30)] + [rng.randrange(64) for _ in range(rng.randint(0, 8))] for _ in range(10)]


def test_a_chunk_begins_anew() -> None:
    tokens = [5, 9, 1, 7, 3, 8, 2]
    changed = [60, *tokens[1:]]
    for chunked, last in (([True], 3), ([False], 3), ([True, True], 3), ([False, False], 6)):
        states = [reference_states(t, [4] * len(chunked), chunked=chunked) for t in (tokens, changed)]
        # How far the first token is felt: to the end of its chunk in any number of layers, or 3 further in each layer.
        assert [p for p in range(7) if states[0][p] != states[1][p]] == list(range(last + 1))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("budget", [5, 64])
def test_tokens_are_those_of_the_naive_loop(model: str, block_size: int, budget: int) -> None:
    windows, chunked = MODELS[model]
    prompts = work(seed=block_size)
    settings: dict[str, Any] = {
        "model": FAKE["model"] | {"windows": windows, "chunked": chunked},
        "cache": {"use": "paged", "block_size": block_size},
        "scheduler": {"use": "continuous", "max_num_batched_tokens": budget, "max_num_seqs": 4},
    }
    with engine(max_model_len=64, **settings) as e:
        assert {group.kind for group in e.parts.layout.groups} >= {"chunked"}
        for i, prompt in enumerate(prompts):
            e.add_request(str(i), prompt, greedy(12))
        done = drain(e)
        for i, prompt in enumerate(prompts):
            want = reference_tokens(prompt, 12, windows=windows, chunked=chunked)
            assert done[str(i)].output_ids == want, f"request {i}: {prompt}"
        assert e.parts.cache.stats().prefix_hits > 0
        check_free(e)


@pytest.mark.parametrize("load", [0, 1], ids=["nothing to load", "loads"])
def test_a_pool_for_a_window_takes_a_long_prompt_beside_a_connector(load: int) -> None:
    settings: dict[str, Any] = {
        "model": FAKE["model"] | {"windows": [5]},
        "cache": {"use": "paged", "block_size": 5, "num_blocks": 1 + 5},
        "scheduler": {"use": "continuous", "max_num_batched_tokens": 7, "max_num_seqs": 2},
        "connector": {"use": "depot", "load": load, "seed": 3},
    }
    prompts = [[(7 * i + j) % 64 for j in range(29)] for i in range(4)]
    with engine(kit, max_model_len=40, **settings) as e:
        for i, prompt in enumerate(prompts):
            e.add_request(str(i), prompt, greedy(8))
        done = drain(e)
        for i, prompt in enumerate(prompts):
            assert done[str(i)].output_ids == reference_tokens(prompt, 8, windows=[5])
        check_free(e)
