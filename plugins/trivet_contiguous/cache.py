"""Memory as engines had it before paging: each request gets one run, long enough for the longest it may become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trivet.ledger import BlockLedger
from trivet.plan import Bool, Int32
from trivet.roles import Allocation, Cache, CacheHit, CacheRequirements, CacheStats, KVGroup, KVLayout, KVStorage
from trivet.sizing import choose_block_size, plan_blocks

if TYPE_CHECKING:
    from trivet.context import Context
    from trivet.state import Request
    from trivet_contiguous.options import ContiguousOptions


class ContiguousCache(Cache):
    """Reserves ``max_model_len`` tokens per request, first fit; the run is a block table with consecutive ids."""

    def __init__(self, context: Context | None, options: ContiguousOptions) -> None:
        self._options = options

    def configure(self, need: CacheRequirements) -> KVLayout:
        """See :meth:`Cache.configure`."""
        size = choose_block_size(self._options.block_size, need.support)
        blocks = plan_blocks(need, size, memory=self._options.memory, num_blocks=self._options.num_blocks)
        self.block_size = size
        self._run = -(-need.max_model_len // size)
        self._ledger = BlockLedger(blocks, need.max_num_seqs, self._run)
        self._is_free: Bool = np.ones(blocks, np.bool_)
        self._is_free[0] = False
        layers = tuple(spec.layer for spec in need.specs)
        group = KVGroup(0, layers, "full", size)
        return KVLayout(need.specs, (group,), tuple(KVStorage((layer,), blocks) for layer in layers))

    def fits(self, num_tokens: int) -> bool:
        """See :meth:`Cache.fits`."""
        return num_tokens <= self._run * self.block_size

    def admit(self, slot: int, request: Request) -> CacheHit:
        """An empty table: the run is reserved by the first :meth:`extend`."""
        return CacheHit()

    def extend(self, slots: Int32, totals: Int32, reserve: Int32 | None = None) -> Allocation:
        """Reserve the run of every row that has none; a row that has one never needs more."""
        out_slots: list[int] = []
        out_blocks: list[int] = []
        for row in np.flatnonzero(self._ledger.length[slots] == 0).tolist():
            start = self._find_run()
            if start is None:
                return Allocation(row, [out_slots], [out_blocks])
            blocks = list(range(start, start + self._run))
            self._is_free[blocks] = False
            self._ledger.append(int(slots[row]), blocks)
            out_slots += [int(slots[row])] * self._run
            out_blocks += blocks
        return Allocation(len(slots), [out_slots], [out_blocks])

    def _find_run(self) -> int | None:
        # Lengths of free stretches, from the edges of the free map.
        edges = np.flatnonzero(np.diff(np.r_[False, self._is_free, False].astype(np.int8)))
        starts, ends = edges[::2], edges[1::2]
        fitting = np.flatnonzero(ends - starts >= self._run)
        return int(starts[fitting[0]]) if len(fitting) else None

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
        self._is_free[self._ledger.settle(lease)] = True

    def reset(self) -> bool:
        """Nothing is kept, so there is nothing to forget."""
        return self._ledger.idle

    def stats(self) -> CacheStats:
        """See :meth:`Cache.stats`."""
        return self._ledger.stats()

    def check_integrity(self) -> None:
        """See :meth:`Role.check_integrity`."""
        self._ledger.check_integrity(np.flatnonzero(self._is_free).tolist())
