"""Who needs which block: block tables and lease counts, shared by cache providers that keep one pool.

A block is *used* while a table holds it, else *retired* while a retired table's lease does, else *leased* while a
transfer does, else free. Which free block comes next is the provider's business."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from trivet.plan import Bool, Int32, Int64
from trivet.roles.cache import CacheStats
from trivet.rows import cells


class BlockLedger:
    """Block tables ``[max_num_seqs, max_blocks]`` of one or several KV groups, and counts per block of the one pool
    that they take blocks from. Block 0 is the null block and never counted.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        max_num_seqs: Rows of the tables.
        max_blocks: Columns of the table of each group; one number for a single group.
    """

    def __init__(self, num_blocks: int, max_num_seqs: int, max_blocks: int | Sequence[int]) -> None:
        self.num_blocks = num_blocks
        widths = [max_blocks] if isinstance(max_blocks, int) else max_blocks
        self.tables: list[Int32] = [np.zeros((max_num_seqs, width), np.int32) for width in widths]
        self.lengths: list[Int32] = [np.zeros(max_num_seqs, np.int32) for _ in widths]  #: entries of each table
        self._used: Int32 = np.zeros(num_blocks, np.int32)
        self._retired: Int32 = np.zeros(num_blocks, np.int32)
        self._leased: Int32 = np.zeros(num_blocks, np.int32)
        self._leases: dict[int, tuple[bool, list[int]]] = {}
        self._next = 0

    @property
    def length(self) -> Int32:
        """``[max_num_seqs]`` entries in the tables of the first group."""
        return self.lengths[0]

    def append(self, slot: int, blocks: Sequence[int], group: int = 0) -> None:
        """Put blocks, which others may use too, at the end of a table; null blocks are places without a block."""
        start = int(self.lengths[group][slot])
        self.tables[group][slot, start : start + len(blocks)] = blocks
        self.lengths[group][slot] = start + len(blocks)
        np.add.at(self._used, np.asarray(blocks, np.int32), 1)
        self._used[0] = 0

    def append_rows(self, slots: Int64, counts: Int32, blocks: Sequence[int], groups: Sequence[int]) -> Int64:
        """Put ``counts[i]`` blocks that nobody has at the end of the table of ``slots[i]``, in each of several groups
        whose tables are equally long. ``blocks`` are those of one group after those of another, in the order of
        ``slots``. Returns the slot of each block of a group."""
        before = self.lengths[groups[0]][slots]
        rows, columns = cells(slots, before, counts)
        after, new = before + counts, np.array(blocks)
        for group, mine in zip(groups, new.reshape(len(groups), len(rows)), strict=True):
            self.tables[group][rows, columns] = mine
            self.lengths[group][slots] = after
        self._used[new] = 1
        return rows

    def drop(self, slots: Int64, groups: Sequence[int], starts: Int32, stops: Int32) -> list[int]:
        """Make the entries ``[starts[i], stops[i])`` of the tables of ``slots[i]`` in several groups null; returns the
        blocks that nobody needs any more, group after group."""
        rows, columns = cells(slots, starts, stops - starts)
        dropped: list[Int32] = []
        for group in groups:
            dropped.append(self.tables[group][rows, columns])
            self.tables[group][rows, columns] = 0
        entries = dropped[0] if len(dropped) == 1 else np.concatenate(dropped)
        blocks = entries[entries != 0].astype(np.intp)
        if len(set(blocks.tolist())) == len(blocks):
            self._used[blocks] -= 1
        else:
            # Two of the tables shared one.
            np.subtract.at(self._used, blocks, 1)
        return list(dict.fromkeys(blocks[self.is_idle(blocks)].tolist()))

    def blocks(self, slot: int, group: int = 0) -> Int32:
        """``[n]`` a copy of a table."""
        return self.tables[group][slot, : self.lengths[group][slot]].copy()

    def is_idle(self, blocks: Int32 | Int64) -> Bool:
        """``[n]`` whether nobody needs each of these blocks."""
        at = blocks.astype(np.intp)
        idle: Bool = (self._used[at] | self._retired[at] | self._leased[at]) == 0
        return idle

    def holders(self, blocks: Iterable[int]) -> list[tuple[int, int, int]]:
        """``(slot, group, index)`` of the first entry of each table that is one of ``blocks``."""
        wanted = np.fromiter(blocks, np.int32)
        found: list[tuple[int, int, int]] = []
        for group, (table, lengths) in enumerate(zip(self.tables, self.lengths, strict=True)):
            for slot in np.flatnonzero(lengths).tolist():
                hits = np.flatnonzero(np.isin(table[slot, : lengths[slot]], wanted))
                if len(hits):
                    found.append((slot, group, int(hits[0])))
        return found

    def retire(self, slot: int) -> int:
        """Empty a slot's tables, keeping their blocks under a lease; they will be given back the last tokens'
        first."""
        if len(self.tables) == 1:
            blocks = self.blocks(slot)
        else:
            tables = [self.blocks(slot, group) for group in range(len(self.tables))]
            # Positions as shares of the table: groups may have blocks of different sizes.
            places = np.concatenate([np.arange(len(t)) / max(len(t), 1) for t in tables])
            blocks = np.concatenate(tables)[np.argsort(places, kind="stable")]
        blocks = blocks[blocks != 0]
        self._used[blocks] -= 1
        self._retired[blocks] += 1
        for lengths in self.lengths:
            lengths[slot] = 0
        return self._new_lease(True, blocks.tolist())

    def lease(self, blocks: Iterable[int]) -> int:
        """Keep blocks for a transfer."""
        held = [int(b) for b in blocks if b]
        np.add.at(self._leased, np.asarray(held, np.int32), 1)
        return self._new_lease(False, held)

    def _new_lease(self, retired: bool, blocks: list[int]) -> int:
        self._next += 1
        self._leases[self._next] = (retired, blocks)
        return self._next

    def settle(self, lease: int) -> list[int]:
        """End a lease; returns the blocks that nobody needs any more, the last of a table first."""
        retired, blocks = self._leases.pop(lease)
        if not blocks:
            return []
        order = np.array(blocks[::-1], np.int32)
        np.subtract.at(self._retired if retired else self._leased, order, 1)
        idle: list[int] = order[self.is_idle(order)].tolist()
        return idle

    @property
    def idle(self) -> bool:
        """Whether no block is needed by anyone."""
        return not self._leases and not any(lengths.any() for lengths in self.lengths)

    def stats(self) -> CacheStats:
        """Counts by state."""
        used = self._used > 0
        retired = (self._retired > 0) & ~used
        leased = (self._leased > 0) & ~used & ~retired
        n_used, n_retired, n_leased = int(used.sum()), int(retired.sum()), int(leased.sum())
        total = self.num_blocks - 1
        return CacheStats(total, total - n_used - n_retired - n_leased, n_used, n_retired, n_leased)

    def check_integrity(self, free: Iterable[int]) -> None:
        """Tables, leases and counts agree, and ``free`` are exactly the blocks that nobody needs, each once."""
        used = np.zeros_like(self._used)
        for table, lengths in zip(self.tables, self.lengths, strict=True):
            for slot in np.flatnonzero(lengths).tolist():
                np.add.at(used, table[slot, : lengths[slot]], 1)
        used[0] = 0
        assert bool((used == self._used).all()), "tables and counts disagree"
        retired, leased = np.zeros_like(used), np.zeros_like(used)
        for is_retired, blocks in self._leases.values():
            np.add.at(retired if is_retired else leased, np.asarray(blocks, np.int32), 1)
        assert bool((retired == self._retired).all() and (leased == self._leased).all()), "leases and counts disagree"
        idle = np.flatnonzero((used == 0) & (retired == 0) & (leased == 0)).tolist()[1:]
        free = sorted(free)
        assert free == idle, f"free list {free} differs from the blocks nobody needs {idle}"
