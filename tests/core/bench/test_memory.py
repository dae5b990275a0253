"""What the memory benchmark draws and measures."""

from __future__ import annotations

import numpy as np
import pytest

from trivet.bench.lengths import LENGTHS, LengthDistribution
from trivet.bench.memory import CACHES, MemoryUse, enough_requests, measure
from trivet.errors import TrivetError

SHORT = LengthDistribution("short", 20, 40, 0.8)


def use(cache: str, lengths: LengthDistribution = SHORT, **changes: int) -> MemoryUse:
    setting = {"num_requests": 90, "kv_tokens": 700, "max_model_len": 128, "block_size": 4} | changes
    return measure(cache, lengths, **setting)


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_have_the_means_and_the_spread_that_are_named(name: str) -> None:
    lengths = LENGTHS[name]
    prompts, outputs = lengths.draw(400, 2048, seed=3)
    assert prompts.mean() == pytest.approx(lengths.mean_prompt, rel=0.03)
    assert outputs.mean() == pytest.approx(lengths.mean_output, rel=0.03)
    assert outputs.std() / outputs.mean() == pytest.approx(lengths.spread, rel=0.1)
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.15
    held = (outputs * (prompts + outputs / 2)).sum() / outputs.sum()
    assert held == pytest.approx(lengths.mean_held, rel=0.1)


def test_lengths_depend_on_the_seed_and_fit_into_the_context() -> None:
    drawn = [SHORT.draw(200, 64, seed=seed) for seed in (1, 1, 2)]
    for prompts, outputs in drawn:
        assert prompts.min() >= 1
        assert outputs.min() >= 1
        assert (prompts + outputs).max() == 64
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("cache", CACHES)
def test_the_shares_of_a_cache_add_up_to_the_whole(cache: str) -> None:
    found = use(cache)
    shares = [found.token_states, found.reservation, found.internal_fragmentation, found.external_fragmentation]
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= -1e-9
    assert found.num_steps > 0
    assert use(cache) == found


def test_the_less_is_reserved_the_more_of_the_memory_holds_tokens() -> None:
    uses = [use(cache) for cache in ("contiguous-max", "contiguous-pow2", "contiguous-oracle", "paged")]
    assert [u.token_states for u in uses] == sorted(u.token_states for u in uses)
    assert [u.mean_running for u in uses] == sorted(u.mean_running for u in uses)


def test_equal_requests_leave_what_can_be_computed_by_hand() -> None:
    # Prompts of 20 and outputs of 44: 64 tokens, of which 11 requests fit into 704, all in step.
    same = LengthDistribution("same", 20, 44, 1e-6)
    oracle = use("contiguous-oracle", same, kv_tokens=704, num_requests=110)
    assert oracle.mean_running == pytest.approx(11, abs=0.1)
    assert oracle.internal_fragmentation == oracle.external_fragmentation == 0
    # From 20 computed tokens at the first step to 63 at the last.
    assert oracle.token_states == pytest.approx((20 + 63) / 2 / 64)
    longest = use("contiguous-max", same, kv_tokens=704, num_requests=110)
    # 128 tokens each: 5 requests of 64 tokens, and 64 tokens of memory that no request can have.
    assert longest.mean_running == 5
    assert longest.external_fragmentation == pytest.approx(64 / 704)
    assert longest.internal_fragmentation == pytest.approx(5 * 64 / 704)
    rounded = use("contiguous-pow2", same, kv_tokens=704, num_requests=110)
    # 20 + 64 tokens, which the buddy allocator rounds up to 128.
    assert rounded.mean_running == 5
    assert rounded.internal_fragmentation == pytest.approx(5 * 20 / 704)


def test_the_paged_cache_wastes_less_than_a_block_per_request() -> None:
    found = use("paged", block_size=4)
    assert found.internal_fragmentation < 4 * found.mean_running / 700
    assert found.token_states > 0.85
    assert use("paged", block_size=16).token_states < found.token_states


def test_callers_are_told_how_many_requests_have_ended() -> None:
    told: list[int] = []
    measure("paged", SHORT, num_requests=90, kv_tokens=700, max_model_len=128, block_size=4, on_ended=told.append)
    assert told == sorted(set(told))
    assert 70 < told[-1] <= 90


def test_a_memory_for_less_than_one_request_is_refused() -> None:
    with pytest.raises(TrivetError, match=r"100 tokens of KV memory are too few.*'contiguous-oracle'.*64 fit"):
        use("contiguous-oracle", kv_tokens=100)


def test_requests_that_never_wait_are_too_few() -> None:
    with pytest.raises(TrivetError, match="3 requests are too few"):
        use("paged", num_requests=3)
    assert 12 * 700 / 60 < enough_requests(SHORT, 700) < 12 * 700 / 45
