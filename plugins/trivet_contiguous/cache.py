"""Memory as engines had it before paging: each request gets one run of blocks, long enough for what it may become.

The baselines that the PagedAttention paper (Kwon et al., SOSP 2023, section 6.1) compares with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trivet.errors import PluginError
from trivet.ledger import BlockLedger
from trivet.plan import Int32
from trivet.roles import Allocation, Cache, CacheHit, CacheRequirements, CacheStats, KVGroup, KVLayout, KVStorage
from trivet.sizing import choose_block_size, plan_blocks, with_dtype
from trivet_contiguous.allocators import Buddy, FirstFit, RunAllocator

if TYPE_CHECKING:
    from trivet.context import Context
    from trivet.state import Request
    from trivet_contiguous.options import ContiguousOptions

_ALLOCATORS: dict[str, type[RunAllocator]] = {"first_fit": FirstFit, "buddy": Buddy}


class ContiguousCache(Cache):
    """Reserves a run of blocks per request at its admission; the run is a block table with consecutive ids.

    What an allocator only rounds up is in no table and counts as leased, by nobody, for as long as the run is there.

    Raises PluginError when there is a cache tier, which could never be of use."""

    def __init__(self, context: Context | None, options: ContiguousOptions) -> None:
        self._options = options
        self._rule = options.reservation
        if context is not None and context.selected("cache_tier"):
            raise PluginError(
                "plugins.cache_tier: the cache 'contiguous' keeps no block of requests that have left, so there is "
                "nothing that a tier could store or load; remove plugins.cache_tier, or set plugins.cache.use to a "
                "cache that finds prefixes, such as paged"
            )

    def configure(self, need: CacheRequirements) -> KVLayout:
        """See :meth:`Cache.configure`."""
        need = with_dtype(self._options.dtype, need)
        size = choose_block_size(self._options.block_size, need.support)
        allocator = _ALLOCATORS[self._options.allocator]
        blocks = plan_blocks(
            need,
            size,
            memory=self._options.memory,
            num_blocks=self._options.num_blocks,
            blocks_for=lambda tokens: allocator.size_of(-(-tokens // size)),
        )
        self.block_size, self._max_model_len = size, need.max_model_len
        self._ledger = BlockLedger(blocks, need.max_num_seqs, -(-need.max_model_len // size))
        self._allocator = allocator(blocks)
        #: blocks that each slot's run will have, or has
        self._runs: Int32 = np.zeros(need.max_num_seqs, np.int32)
        #: slot, and later the lease of its retired table → the lease of what its run was rounded up by
        self._rounding: dict[int, int] = {}
        self._retired_rounding: dict[int, int] = {}
        layers = tuple(spec.layer for spec in need.specs)
        group = KVGroup(0, layers, "full", size)
        return KVLayout(need.specs, (group,), tuple(KVStorage((layer,), blocks) for layer in layers))

    def fits(self, num_tokens: int) -> bool:
        """See :meth:`Cache.fits`; no reservation is longer than ``max_model_len``, for which there is memory."""
        return num_tokens <= self._max_model_len

    def request_blocks(self, num_tokens: int) -> int:
        """See :meth:`Cache.request_blocks`: what the longest reservation that it may get is rounded up to."""
        tokens = num_tokens if self._rule == "oracle" else self._max_model_len
        return self._allocator.size_of(-(-tokens // self.block_size))

    def reserved_tokens(self, request: Request) -> int:
        """Tokens that ``reservation`` sets aside for a request, before these are rounded up to blocks."""
        if self._rule == "max":
            return self._max_model_len
        if self._rule == "oracle":
            return request.max_total
        outputs = request.max_total - request.num_prompt
        rounded = 1 << (outputs - 1).bit_length() if outputs else 0
        return min(request.num_prompt + rounded, self._max_model_len)

    def admit(self, slot: int, request: Request) -> CacheHit:
        """An empty table: the run is reserved by the first :meth:`extend`."""
        self._runs[slot] = -(-self.reserved_tokens(request) // self.block_size)
        return CacheHit()

    def extend(self, slots: Int32, totals: Int32, reserve: Int32 | None = None) -> Allocation:
        """Reserve the run of every row that has none; a row that has one never needs more, so ``reserve`` changes
        nothing."""
        assert bool((totals <= self._runs[slots] * self.block_size).all()), "a request outgrows its max_total"
        out_slots: list[int] = []
        out_blocks: list[int] = []
        for row in np.flatnonzero(self._ledger.length[slots] == 0).tolist():
            slot = int(slots[row])
            count = int(self._runs[slot])
            start = self._allocator.take(count)
            if start is None:
                return Allocation(row, [out_slots], [out_blocks])
            blocks = list(range(start, start + count))
            self._ledger.append(slot, blocks)
            rounding = range(start + count, start + self._allocator.size_of(count))
            if rounding:
                self._rounding[slot] = self._ledger.lease(rounding)
            out_slots += [slot] * count
            out_blocks += blocks
        return Allocation(len(slots), [out_slots], [out_blocks])

    def tables(self, slot: int) -> list[Int32]:
        """See :meth:`Cache.tables`."""
        return [self._ledger.blocks(slot)]

    def retire(self, slot: int) -> int:
        """See :meth:`Cache.retire`."""
        lease = self._ledger.retire(slot)
        rounding = self._rounding.pop(slot, None)
        if rounding is not None:
            self._retired_rounding[lease] = rounding
        return lease

    def lease(self, blocks: Sequence[Int32]) -> int:
        """See :meth:`Cache.lease`."""
        return self._ledger.lease(blocks[0].tolist())

    def settle(self, lease: int) -> None:
        """See :meth:`Cache.settle`."""
        free = self._ledger.settle(lease)
        rounding = self._retired_rounding.pop(lease, None)
        if rounding is not None:
            free += self._ledger.settle(rounding)
        self._allocator.give(free)

    def reset(self) -> bool:
        """Nothing is kept, so there is nothing to forget."""
        return self._ledger.idle

    def stats(self) -> CacheStats:
        """See :meth:`Cache.stats`; what an allocator only rounded up is leased."""
        return self._ledger.stats()

    def check_integrity(self) -> None:
        """See :meth:`Role.check_integrity`."""
        self._ledger.check_integrity(self._allocator.free_blocks())
        self._allocator.check_integrity()
