"""Blocks on demand: a table grows by a block when its tokens need one (PagedAttention, Kwon et al., SOSP 2023)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trivet.ledger import BlockLedger
from trivet.plan import Int32
from trivet.roles import Allocation, Cache, CacheHit, CacheRequirements, CacheStats, KVGroup, KVLayout, KVStorage
from trivet.sizing import choose_block_size, plan_blocks

if TYPE_CHECKING:
    from trivet.context import Context
    from trivet.state import Request
    from trivet_paged.options import PagedOptions


class PagedCache(Cache):
    """One KV group for all layers; layers with a window keep all tokens and mask what is outside it."""

    def __init__(self, context: Context | None, options: PagedOptions) -> None:
        self._options = options
        self._free: deque[int] = deque()

    def configure(self, need: CacheRequirements) -> KVLayout:
        """See :meth:`Cache.configure`."""
        size = choose_block_size(self._options.block_size, need.support)
        blocks = plan_blocks(need, size, memory=self._options.memory, num_blocks=self._options.num_blocks)
        self.block_size = size
        self._ledger = BlockLedger(blocks, need.max_num_seqs, -(-need.max_model_len // size))
        self._free = deque(range(1, blocks))
        layers = tuple(spec.layer for spec in need.specs)
        group = KVGroup(0, layers, "full", size)
        return KVLayout(need.specs, (group,), tuple(KVStorage((layer,), blocks) for layer in layers))

    def fits(self, num_tokens: int) -> bool:
        """See :meth:`Cache.fits`."""
        return -(-num_tokens // self.block_size) < self._ledger.num_blocks

    def admit(self, slot: int, request: Request) -> CacheHit:
        """An empty table: nothing is kept from one request to another."""
        return CacheHit()

    def extend(self, slots: Int32, totals: Int32) -> Allocation:
        """See :meth:`Cache.extend`; rows that need no block cost no Python."""
        ledger, free = self._ledger, self._free
        missing = -(-totals // self.block_size) - ledger.length[slots]
        rows = np.flatnonzero(missing > 0)
        if not len(rows):
            return Allocation(len(slots), [[]], [[]])
        counts = missing[rows]
        fitting = int(np.searchsorted(counts.cumsum(), len(free), side="right"))
        done = len(slots) if fitting == len(rows) else int(rows[fitting])
        taken, counts = slots[rows[:fitting]], counts[:fitting]
        blocks = [free.popleft() for _ in range(int(counts.sum()))]
        ledger.append_rows(taken, counts, np.array(blocks, np.int32))
        return Allocation(done, [np.repeat(taken, counts).tolist()], [blocks])

    def tables(self, slot: int) -> list[Int32]:
        """See :meth:`Cache.tables`."""
        return [self._ledger.blocks(slot)]

    def retire(self, slot: int) -> int:
        """See :meth:`Cache.retire`."""
        return self._ledger.retire(slot)

    def lease(self, blocks: Sequence[Int32]) -> int:
        """See :meth:`Cache.lease`."""
        return self._ledger.lease(blocks[0].tolist())

    def settle(self, lease: int) -> None:
        """See :meth:`Cache.settle`."""
        self._free.extend(self._ledger.settle(lease))

    def reset(self) -> bool:
        """Nothing is kept, so there is nothing to forget."""
        return self._ledger.idle

    def stats(self) -> CacheStats:
        """See :meth:`Cache.stats`."""
        return self._ledger.stats()

    def check_integrity(self) -> None:
        """See :meth:`Role.check_integrity`."""
        self._ledger.check_integrity(self._free)
