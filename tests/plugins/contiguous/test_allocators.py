"""Runs of blocks: where they are put, and that none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet_contiguous.allocators import Buddy, FirstFit, RunAllocator

KINDS = pytest.mark.parametrize("kind", [FirstFit, Buddy])


def taken(allocator: RunAllocator, count: int) -> list[int]:
    start = allocator.take(count)
    assert start is not None
    return list(range(start, start + allocator.size_of(count)))


def test_first_fit_takes_the_lowest_stretch_that_is_long_enough() -> None:
    memory = FirstFit(1 + 20)
    first, second, third = taken(memory, 3), taken(memory, 2), taken(memory, 5)
    assert (first[0], second[0], third[0]) == (1, 4, 6)
    memory.give(first)
    memory.give(third)
    assert taken(memory, 4)[0] == 6
    assert taken(memory, 3)[0] == 1
    memory.give(second)
    assert taken(memory, 11)[0] == 10
    assert memory.take(3) is None


def test_buddy_halves_the_smallest_chunk_that_is_large_enough() -> None:
    memory = Buddy(1 + 16)
    assert taken(memory, 3) == [1, 2, 3, 4]
    assert taken(memory, 1) == [5]
    assert taken(memory, 5) == list(range(9, 17))
    assert taken(memory, 2) == [7, 8]
    assert memory.free_blocks() == [6]
    assert memory.take(2) is None


def test_buddy_joins_halves_that_are_both_free() -> None:
    memory = Buddy(1 + 8)
    ones = [taken(memory, 1) for _ in range(8)]
    for blocks in ones[::2]:
        memory.give(blocks)
    assert memory.take(2) is None  # four blocks are free, and no two of them together
    for blocks in ones[1::2]:
        memory.give(blocks)
    assert taken(memory, 8) == list(range(1, 9))


def test_a_memory_that_is_no_power_of_two_is_used_whole() -> None:
    memory = Buddy(1 + 13)
    assert [taken(memory, n)[0] for n in (4, 8, 1)] == [9, 1, 13]
    assert memory.free_blocks() == []


@KINDS
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    size=st.integers(1, 40),
    actions=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 99), st.booleans()), max_size=60),
)
def test_no_block_is_lost_or_given_twice(
    kind: type[RunAllocator], size: int, actions: list[tuple[int, int, bool]]
) -> None:
    memory = kind(1 + size)
    held: list[list[int]] = []
    for count, index, whole in actions:
        free = set(memory.free_blocks())
        if index % 2:
            start = memory.take(count)
            if start is None:
                assert not any(set(range(b, b + kind.size_of(count))) <= free for b in free if kind is FirstFit)
            else:
                run = list(range(start, start + kind.size_of(count)))
                assert set(run) <= free
                held.append(run)
        elif held:
            run = held.pop(index % len(held))
            # Blocks that a transfer still reads come back later than the others.
            back = run if whole else [block for i, block in enumerate(run) if (index >> (i % 6)) & 1]
            memory.give(back)
            if len(back) < len(run):
                held.append([block for block in run if block not in back])
        memory.check_integrity()
        assert sorted([*memory.free_blocks(), *(b for run in held for b in run)]) == list(range(1, size + 1))
    for run in held:
        memory.give(run)
    memory.check_integrity()
    assert memory.free_blocks() == list(range(1, size + 1))
