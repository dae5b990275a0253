"""Greedy tokens in float32 equal those of transformers' ``generate``, whatever is found in the prefix cache."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import kit
import pytest
from sharing import Round, Session, findable

BLOCKS, BUDGETS, POOLS = (1, 8, 16), (7, 64, 100_000), (True, False)


def pairs() -> list[tuple[str, int, int, bool]]:
    """Every pair of values of two factors is in some case."""
    return [
        (family, block_size, BUDGETS[(f + b) % 3], POOLS[(f + b + 1) % 2])
        for f, family in enumerate(kit.FAMILIES)
        for b, block_size in enumerate(BLOCKS)
    ]


def check_rounds(library: Any, family: str, settings: dict[str, Any], *, small: bool) -> None:
    """The same groups cold, warm, and after a reset; and the conversations that go on from them."""
    groups, turns = library.rounds(family)
    block_size = settings["plugins"]["cache"]["block_size"]
    with Session(settings) as session:
        cold = session.check(groups)
        assert cold.prefix_hits > 0, "requests that come together share their beginnings"
        warm = session.check(groups)
        later = session.check(turns)
        assert (cold.evicted + warm.evicted > 0) == small
        if small:
            assert warm.prefix_hits + later.prefix_hits > 0
        else:
            assert warm.cached == findable(groups.work, block_size)
            before = [
                (len(prompt) + len(output) - 1) // block_size * block_size
                for (prompt, _), output in list(zip(groups.work, groups.want, strict=True))[::2]
            ]
            assert all(found >= known for found, known in zip(later.cached, before, strict=True))
        assert session.cache.reset()
        again = session.check(groups)
        assert again.cached == cold.cached, "after a reset everything is as at the beginning"
        assert again.prefix_hits == cold.prefix_hits
        assert session.cache.stats().tier_hits == 0


@pytest.mark.parametrize(("family", "block_size", "budget", "small"), pairs())
def test_pairwise(library: Any, family: str, block_size: int, budget: int, small: bool) -> None:
    settings = kit.settings(library.path(family), family, block_size=block_size, budget=budget, small=small)
    check_rounds(library, family, settings, small=small)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "block_size", "budget", "small"), list(product(kit.FAMILIES, BLOCKS, BUDGETS, POOLS))
)
def test_cross_product(library: Any, family: str, block_size: int, budget: int, small: bool) -> None:
    settings = kit.settings(library.path(family), family, block_size=block_size, budget=budget, small=small)
    check_rounds(library, family, settings, small=small)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_without_prefix_caching_nothing_is_found(library: Any, family: str) -> None:
    settings = kit.settings(library.path(family), family, block_size=8, budget=64, small=False)
    settings["plugins"]["cache"]["prefix_caching"] = False
    groups, turns = library.rounds(family)
    with Session(settings) as session:
        for round_ in (groups, groups, turns):
            ran = session.check(round_)
            assert set(ran.cached) == {0}
            assert (ran.prefix_hits, ran.evicted) == (0, 0)


def test_static_batches_share_beginnings_too(library: Any) -> None:
    settings = kit.settings(library.path("gemma3_text"), "gemma3_text", block_size=8, budget=64, small=False)
    settings["plugins"]["scheduler"]["use"] = "static"
    groups, turns = library.rounds("gemma3_text")
    with Session(settings) as session:
        session.check(groups)
        assert session.check(groups).cached == findable(groups.work, 8)
        assert session.check(turns).prefix_hits > 0


@pytest.mark.parametrize(
    ("family", "block_size"), [(f, BLOCKS[i % 3]) for i, f in enumerate([*kit.FAMILIES, "gemma3_text", "gemma3_text"])]
)
def test_what_was_evicted_is_computed_again(library: Any, family: str, block_size: int) -> None:
    settings = kit.settings(library.path(family), family, block_size=block_size, budget=64, small=True)
    groups, _ = library.rounds(family)
    longest = max(range(len(groups.work)), key=lambda i: len(groups.work[i][0]))
    one = Round(groups.work[longest : longest + 1], groups.want[longest : longest + 1], groups.gaps[longest:][:1])
    rng = random.Random(7)
    with Session(settings) as session:
        assert session.check(one).cached == [0]
        assert session.check(one).cached == findable(one.work, block_size)
        evicted = 0
        for _ in range(3):
            # Each fills the pool but for a few blocks.
            filler = [rng.randrange(kit.VOCAB) for _ in range(kit.LONGEST - 4)]
            evicted += session.run([(filler, 4)]).evicted
        assert evicted >= session.cache.stats().total
        assert session.check(one).cached == [0]
        assert session.check(one).cached == findable(one.work, block_size)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("block_size", BLOCKS)
def test_full_hits_compute_the_last_token(library: Any, family: str, block_size: int) -> None:
    settings = kit.settings(library.path(family), family, block_size=block_size, budget=64, small=False)
    groups, _ = library.rounds(family)
    at = [i for i, (prompt, _) in enumerate(groups.work) if len(prompt) == 32]
    assert len(at) >= 3, "one prompt comes twice"
    twins = Round(*([values[i] for i in at] for values in (groups.work, groups.want, groups.gaps)))
    with Session(settings) as session:
        # In one batch the second of two equal prompts waits for the first, or computes all of it beside it.
        assert set(session.check(twins).cached) <= {0, 32 - block_size}
        assert set(session.check(twins).cached) == {32 - block_size}


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_preempted_requests_find_their_own_blocks(library: Any, family: str) -> None:
    rng = random.Random(3)
    shared = [rng.randrange(kit.VOCAB) for _ in range(24)]
    work = [([*shared, *(rng.randrange(kit.VOCAB) for _ in range(4))], 30) for _ in range(10)]
    round_ = Round(work, *kit.reference(library.path(family), work))
    settings = kit.settings(library.path(family), family, block_size=8, budget=64, small=True)
    with Session(settings) as session:
        ran = session.check(round_)
        again = [request for request in ran.requests if request.num_preemptions]
        found_at_returns = ran.prefix_hits - sum(ran.cached)
        assert (found_at_returns > 0) == bool(again)
        if family not in kit.WINDOWS:
            assert again
            recomputed = sum(request.num_recomputed_tokens for request in again)
            assert recomputed <= sum(8 * request.num_preemptions for request in again), "only what no full block held"
