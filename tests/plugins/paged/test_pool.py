"""In which order blocks are used again, and what observers are told."""

from __future__ import annotations

import random

import pytest

from trivet.events import BlocksStored
from trivet_paged.pool import BlockPool, EventLog


def digest(i: int) -> bytes:
    return bytes([i]) * 32


def named(pool: BlockPool, count: int, start: int = 0) -> list[int]:
    blocks = pool.take(count, [])
    pool.name(0, [digest(start + i) for i in range(count)], blocks)
    return blocks


def test_blocks_that_hold_nothing_are_used_first() -> None:
    pool = BlockPool(6, 1)
    kept = named(pool, 2)
    blank = pool.take(2, [])
    pool.give(kept)
    pool.give(blank)
    evicted: list[tuple[int, bytes, int]] = []
    first = pool.take(3, evicted)
    assert set(first).isdisjoint(kept)
    assert not evicted
    assert pool.take(2, evicted) == kept
    assert evicted == [(0, digest(0), kept[0]), (0, digest(1), kept[1])]
    assert pool.num_evicted == 2
    assert pool.num_free == 0


def test_what_was_given_back_first_goes_first() -> None:
    pool = BlockPool(8, 1)
    one, two = named(pool, 3), named(pool, 3, start=10)
    pool.give(two[::-1])
    pool.give(one[::-1])
    pool.take(1, [])
    evicted: list[tuple[int, bytes, int]] = []
    assert pool.take(6, evicted) == [*two[::-1], *one[::-1]], "tails before heads, the older request before the younger"
    assert [d for _, d, _ in evicted] == [digest(i) for i in (12, 11, 10, 2, 1, 0)]


def test_a_head_that_is_used_again_outlives_its_tail() -> None:
    pool = BlockPool(5, 1)
    head, middle, tail = named(pool, 3)
    pool.give([tail, middle, head])
    pool.claim([head])
    pool.give([head])
    other = named(pool, 1, start=10)
    pool.give(other)
    pool.claim([middle])
    pool.give([middle])
    assert pool.take(4, []) == [tail, head, *other, middle]


def test_a_name_belongs_to_one_block_and_a_block_has_one_name() -> None:
    pool = BlockPool(5, 2)
    a, b = pool.take(2, [])
    assert pool.name(0, [digest(1), digest(2), digest(3)], [a, 0, b]) == [0, 2]
    c = pool.take(1, [])[0]
    assert pool.name(0, [digest(1)], [c]) == [], "another block holds the same"
    assert pool.name(0, [digest(9)], [a]) == [], "a block is not named twice"
    assert pool.name(1, [digest(1)], [c]) == [0], "groups have names of their own"
    pool.give([c])
    pool.check_integrity()


def test_a_block_that_is_forgotten_is_used_before_others() -> None:
    pool = BlockPool(4, 1)
    blocks = named(pool, 3)
    pool.give(blocks)
    assert pool.forget(blocks[2]) == (0, digest(2))
    assert pool.forget(blocks[2]) is None
    assert digest(2) not in pool.index[0]
    pool.check_integrity()
    assert pool.take(1, []) == [blocks[2]]


def test_clear_keeps_blocks_and_loses_names() -> None:
    pool = BlockPool(6, 1)
    pool.give(named(pool, 3))
    pool.clear()
    assert pool.num_free == 5
    assert pool.index == [{}]
    evicted: list[tuple[int, bytes, int]] = []
    assert sorted(pool.take(5, evicted)) == [1, 2, 3, 4, 5]
    assert not evicted


@pytest.mark.parametrize("seed", range(30))
def test_events_replay_to_what_can_be_found(seed: int) -> None:
    """Whatever happens between two reports, applying evictions first and stores after gives the present content."""
    rng, log = random.Random(seed), EventLog()
    now: dict[tuple[int, bytes], int] = {}
    replayed: dict[tuple[int, bytes], int] = {}
    for _ in range(300):
        dice = rng.random()
        key = rng.randrange(2), digest(rng.randrange(6))
        if dice < 0.45:
            fresh = sorted({(g, digest(rng.randrange(6))) for g in [key[0]] for _ in range(3)} - now.keys())
            if fresh:
                blocks = [rng.randrange(1000) for _ in fresh]
                now |= dict(zip(fresh, blocks, strict=True))
                log.stored(BlocksStored(key[0], list(blocks), [d for _, d in fresh]))
        elif dice < 0.8:
            if key in now:
                del now[key]
                log.evicted(*key)
        elif dice < 0.83:
            now.clear()
            log.cleared(2)
        else:
            stored, evicted = log.take()
            for lost in evicted:
                gone = [k for k in replayed if k[0] == lost.group] if lost.cleared else []
                for k in [*gone, *((lost.group, d) for d in lost.hashes)]:
                    del replayed[k]
            for event in stored:
                for block, d in zip(event.blocks, event.hashes, strict=True):
                    assert (event.group, d) not in replayed, "told once"
                    replayed[event.group, d] = block
            assert replayed == now


def test_a_block_that_is_lost_before_anybody_was_told_is_left_out_with_its_tokens() -> None:
    log = EventLog()
    detail = {"block_size": 2, "parent": digest(9), "token_ids": [10, 11, 20, 21, 30, 31], "tags": {}}
    log.stored(BlocksStored(0, [1, 2, 3], [digest(1), digest(2), digest(3)], detail))
    log.evicted(0, digest(2))
    first, last = log.take()[0]
    assert (first.blocks, first.detail["parent"], first.detail["token_ids"]) == ([1], digest(9), [10, 11])
    assert (last.blocks, last.detail["parent"], last.detail["token_ids"]) == ([3], digest(2), [30, 31])
    log.stored(BlocksStored(0, [4], [digest(4)], {"block_size": 2, "tier": "offload"}))
    log.evicted(0, digest(4))
    assert log.take() == ([], [])
