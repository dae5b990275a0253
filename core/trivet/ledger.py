"""Who needs which block: block tables and lease counts, shared by cache providers that keep one pool.

A block is *used* while a table holds it, else *retired* while a retired table's lease does, else *leased* while a
transfer does, else free. Which free block comes next is the provider's business."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trivet.plan import Int32
from trivet.roles.cache import CacheStats
from trivet.rows import spans


class BlockLedger:
    """Block tables ``[max_num_seqs, max_blocks]`` and counts per block. Block 0 is the null block and never counted."""

    def __init__(self, num_blocks: int, max_num_seqs: int, max_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.table: Int32 = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.length: Int32 = np.zeros(max_num_seqs, np.int32)  #: blocks in each table
        self._used: Int32 = np.zeros(num_blocks, np.int32)
        self._retired: Int32 = np.zeros(num_blocks, np.int32)
        self._leased: Int32 = np.zeros(num_blocks, np.int32)
        self._leases: dict[int, tuple[bool, list[int]]] = {}
        self._next = 0

    def append(self, slot: int, blocks: Sequence[int]) -> None:
        """Put blocks at the end of a table."""
        start = int(self.length[slot])
        self.table[slot, start : start + len(blocks)] = blocks
        self.length[slot] = start + len(blocks)
        np.add.at(self._used, np.asarray(blocks, np.int32), 1)

    def append_rows(self, slots: Int32, counts: Int32, blocks: Int32) -> None:
        """Put ``counts[i]`` blocks that nobody has at the end of the table of ``slots[i]``, in the order of
        ``blocks``."""
        _, columns = spans(self.length[slots], counts)
        self.table[np.repeat(slots, counts), columns] = blocks
        self.length[slots] += counts
        self._used[blocks] += 1

    def blocks(self, slot: int) -> Int32:
        """``[n]`` a copy of a table."""
        return self.table[slot, : self.length[slot]].copy()

    def retire(self, slot: int) -> int:
        """Empty a table, keeping its blocks under a lease."""
        blocks = self.blocks(slot)
        self._used[blocks] -= 1
        self._retired[blocks] += 1
        self.length[slot] = 0
        return self._new_lease(True, blocks.tolist())

    def lease(self, blocks: Sequence[int]) -> int:
        """Keep blocks for a transfer."""
        held = [int(b) for b in blocks if b]
        self._leased[held] += 1
        return self._new_lease(False, held)

    def _new_lease(self, retired: bool, blocks: list[int]) -> int:
        self._next += 1
        self._leases[self._next] = (retired, blocks)
        return self._next

    def settle(self, lease: int) -> list[int]:
        """End a lease; returns the blocks that nobody needs any more, the last of a table first."""
        retired, blocks = self._leases.pop(lease)
        counts = self._retired if retired else self._leased
        counts[blocks] -= 1
        idle = (self._used[blocks] == 0) & (self._retired[blocks] == 0) & (self._leased[blocks] == 0)
        return [b for b, free in zip(reversed(blocks), reversed(idle.tolist()), strict=True) if free]

    @property
    def idle(self) -> bool:
        """Whether no block is needed by anyone."""
        return not self._leases and not self.length.any()

    def stats(self) -> CacheStats:
        """Counts by state."""
        used = self._used > 0
        retired = (self._retired > 0) & ~used
        leased = (self._leased > 0) & ~used & ~retired
        n_used, n_retired, n_leased = int(used.sum()), int(retired.sum()), int(leased.sum())
        total = self.num_blocks - 1
        return CacheStats(total, total - n_used - n_retired - n_leased, n_used, n_retired, n_leased)

    def check_integrity(self, free: Sequence[int]) -> None:
        """Tables, leases and counts agree, and ``free`` are exactly the blocks that nobody needs, each once."""
        used = np.zeros_like(self._used)
        for slot in np.flatnonzero(self.length).tolist():
            np.add.at(used, self.table[slot, : self.length[slot]], 1)
        assert not used[0], "the null block is in use"
        assert bool((used == self._used).all()), "tables and counts disagree"
        retired, leased = np.zeros_like(used), np.zeros_like(used)
        for is_retired, blocks in self._leases.values():
            np.add.at(retired if is_retired else leased, np.asarray(blocks, np.int32), 1)
        assert bool((retired == self._retired).all() and (leased == self._leased).all()), "leases and counts disagree"
        idle = np.flatnonzero((used == 0) & (retired == 0) & (leased == 0)).tolist()[1:]
        assert sorted(free) == idle, f"free list {sorted(free)} differs from the blocks nobody needs {idle}"
