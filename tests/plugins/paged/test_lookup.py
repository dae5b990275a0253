"""What is found, against trying every length."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.roles import KVGroup, TierStats
from trivet_paged.groups import Group
from trivet_paged.lookup import Lookup, tier_key
from trivet_paged.pool import BlockPool

BASE = 2  # tokens per block of the smallest size
CHAIN = [bytes([i]) * 32 for i in range(24)]


class Shelf:
    """As much of a tier as a lookup asks for."""

    def __init__(self, keys: set[bytes]) -> None:
        self.keys = keys

    def holds(self, key: bytes) -> bool:
        return key in self.keys

    def stats(self) -> TierStats:
        return TierStats("shelf")


GROUPS = st.lists(
    st.tuples(st.sampled_from(["full", "sliding", "chunked"]), st.sampled_from([1, 2, 3]), st.integers(1, 13)),
    min_size=1,
    max_size=4,
)
CONTENT = st.lists(st.lists(st.sampled_from([0, 1, 1, 1, 2]), min_size=24, max_size=24), min_size=4, max_size=4)


def made(kinds: list[Any]) -> list[Group]:
    smallest = min(factor for _, factor, _ in kinds)
    groups = []
    for index, (kind, factor, window) in enumerate(kinds):
        scale = factor if smallest == 1 else 1
        own = None if kind == "full" else window
        groups.append(Group(KVGroup(index, (index,), kind, BASE * scale, own), scale))
    return groups


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(kinds=GROUPS, content=CONTENT, length=st.integers(0, 24), most=st.integers(0, 60))
def test_the_longest_beginning_is_found(kinds: Any, content: Any, length: int, most: int) -> None:
    """``content[g][i]``: block i of group g is nowhere (0), in the pool (1) or in a tier (2)."""
    groups = made(kinds)
    pool, keys = BlockPool(200, len(groups)), set()
    where: dict[tuple[int, int], int] = {}
    for group in groups:
        for i in range(len(CHAIN) // group.factor):
            digest = CHAIN[(i + 1) * group.factor - 1]
            if content[group.index][i] == 1:
                (block,) = pool.take(1, [])
                pool.name(group.index, [digest], [block])
                where[group.index, i] = block
            elif content[group.index][i] == 2:
                keys.add(tier_key(group.index, digest))
                where[group.index, i] = -1
    shelf: Any = Shelf(keys)
    chain = CHAIN[:length]
    found = Lookup(groups, pool, [shelf]).longest(chain, most)

    def works(tokens: int) -> bool:
        for group in groups:
            if tokens % group.size:
                return False
            if any((group.index, i) not in where for i in range(group.first_block(tokens), tokens // group.size)):
                return False
        return True

    expected = max(n for n in range(min(most, length * BASE) + 1) if n == 0 or works(n))
    assert found.num_tokens == expected
    for group in groups:
        first, last = group.first_block(expected), expected // group.size
        entries = [where[group.index, i] for i in range(first, last)]
        assert found.blocks[group.index] == ([0] * first + entries if expected else [])
    loads = [(group, i) for group, i, tier in found.loads if tier is shelf]
    assert loads == [(g.index, i) for g in groups for i, b in enumerate(found.blocks[g.index]) if b == -1]


def test_the_pool_comes_before_tiers_and_tiers_in_their_order() -> None:
    groups = made([("full", 1, 0)])
    pool = BlockPool(10, 1)
    (block,) = pool.take(1, [])
    pool.name(0, [CHAIN[0]], [block])
    first: Any = Shelf({tier_key(0, CHAIN[i]) for i in (0, 1)})
    second: Any = Shelf({tier_key(0, CHAIN[i]) for i in (0, 1, 2)})
    found = Lookup(groups, pool, [first, second]).longest(CHAIN[:3], 100)
    assert found.blocks == [[block, -1, -1]]
    assert found.loads == [(0, 1, first), (0, 2, second)]


@pytest.mark.parametrize(("known", "hit"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4)])
def test_the_last_known_token_is_never_found(known: int, hit: int) -> None:
    pool = BlockPool(10, 1)
    pool.name(0, CHAIN[:3], pool.take(3, []))
    found = Lookup(made([("full", 1, 0)]), pool, ()).longest(CHAIN[: known // BASE], known - 1)
    assert found.num_tokens == hit
