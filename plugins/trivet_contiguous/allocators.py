"""How a run of consecutive blocks is found: first fit, and the buddy system.

Both hand out and take back block ids from 1 on; block 0 is the null block and never theirs. Blocks of a run may come
back one by one, in any order: those that a transfer still reads come later than the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from trivet.plan import Bool


class RunAllocator(ABC):
    """Runs of blocks over ``[1, num_blocks)``; all of them are free at first."""

    @abstractmethod
    def __init__(self, num_blocks: int) -> None: ...

    @staticmethod
    @abstractmethod
    def size_of(count: int) -> int:
        """Blocks that a run of ``count`` blocks takes up, what is only rounded up included; non-decreasing."""

    @abstractmethod
    def take(self, count: int) -> int | None:
        """The first block of ``size_of(count)`` consecutive ones, which are no longer free; None when there are none
        (nothing has changed then)."""

    @abstractmethod
    def give(self, blocks: Sequence[int]) -> None:
        """Blocks that become free."""

    @abstractmethod
    def free_blocks(self) -> list[int]:
        """Ids of all free blocks, in order."""

    def check_integrity(self) -> None:
        """Raise AssertionError when the state contradicts itself."""


class FirstFit(RunAllocator):
    """The lowest place where a run fits; neighbours that are free are one place by themselves."""

    def __init__(self, num_blocks: int) -> None:
        self._is_free: Bool = np.ones(num_blocks, np.bool_)
        self._is_free[0] = False

    @staticmethod
    def size_of(count: int) -> int:
        """As many as asked for."""
        return count

    def take(self, count: int) -> int | None:
        """See :meth:`RunAllocator.take`."""
        # Lengths of free stretches, from the edges of the free map.
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        fitting = np.flatnonzero(ends - starts >= count)
        if not len(fitting):
            return None
        start = int(starts[fitting[0]])
        self._is_free[start : start + count] = False
        return start

    def give(self, blocks: Sequence[int]) -> None:
        """See :meth:`RunAllocator.give`."""
        self._is_free[np.asarray(blocks, np.int32)] = True

    def free_blocks(self) -> list[int]:
        """See :meth:`RunAllocator.free_blocks`."""
        found: list[int] = np.flatnonzero(self._is_free).tolist()
        return found


class Buddy(RunAllocator):
    """Chunks of powers of two, halved to serve a smaller run and joined with their other half when both are free
    (Knowlton, "A fast storage allocator", CACM 1965).

    A memory that is no power of two begins as the largest chunks that make it up: 13 blocks are 8, 4 and 1."""

    def __init__(self, num_blocks: int) -> None:
        self._size = num_blocks - 1
        #: per order, offsets of free chunks of ``2**order`` blocks; the block at offset 0 has the id 1
        self._free: list[set[int]] = [set() for _ in range(self._size.bit_length())]
        self.give(range(1, num_blocks))

    @staticmethod
    def size_of(count: int) -> int:
        """The next power of two."""
        return 1 << (count - 1).bit_length()

    def take(self, count: int) -> int | None:
        """See :meth:`RunAllocator.take`; the smallest chunk that is large enough, the lowest of these."""
        wanted = (count - 1).bit_length()
        order = next((i for i in range(wanted, len(self._free)) if self._free[i]), None)
        if order is None:
            return None
        offset = min(self._free[order])
        self._free[order].remove(offset)
        while order > wanted:
            order -= 1
            self._free[order].add(offset + (1 << order))
        return 1 + offset

    def give(self, blocks: Sequence[int]) -> None:
        """See :meth:`RunAllocator.give`; works on stretches of blocks, so a whole run costs no more than one block."""
        for start, stop in _stretches(blocks):
            offset, end = start - 1, stop - 1
            while offset < end:
                # The largest chunk that begins here, and ends within the stretch.
                order = min((offset & -offset or self._size).bit_length(), (end - offset).bit_length()) - 1
                self._join(offset, order)
                offset += 1 << order

    def _join(self, offset: int, order: int) -> None:
        while order + 1 < len(self._free) and offset ^ (1 << order) in self._free[order]:
            self._free[order].remove(offset ^ (1 << order))
            offset &= ~(1 << order)
            order += 1
        self._free[order].add(offset)

    def free_blocks(self) -> list[int]:
        """See :meth:`RunAllocator.free_blocks`."""
        chunks = ((offset, 1 << order) for order, offsets in enumerate(self._free) for offset in offsets)
        return [1 + block for offset, size in sorted(chunks) for block in range(offset, offset + size)]

    def check_integrity(self) -> None:
        """Chunks lie at multiples of their size, apart from each other, and are joined as far as they can be."""
        end = 0
        for offset, order in sorted((offset, order) for order, some in enumerate(self._free) for offset in some):
            size = 1 << order
            assert offset % size == 0, f"a chunk of {size} blocks at {offset}"
            assert end <= offset <= self._size - size, f"the chunk of {size} blocks at {offset} overlaps another"
            assert offset ^ size not in self._free[order], f"two halves of {2 * size} blocks at {offset} are not joined"
            end = offset + size


def _stretches(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """``(start, stop)`` of the stretches of consecutive numbers."""
    ids = np.sort(np.fromiter(blocks, np.int64))
    if not len(ids):
        return []
    cuts = np.flatnonzero(np.diff(ids) != 1)
    starts, ends = np.r_[ids[:1], ids[cuts + 1]], np.r_[ids[cuts], ids[-1:]]
    return list(zip(starts.tolist(), (ends + 1).tolist(), strict=True))
