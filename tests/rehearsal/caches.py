"""Caches that do what the bundled ones leave to later: two groups, forks with copy on write, prefixes tagged by
adapter."""

from __future__ import annotations

from typing import Any

import numpy as np

from trivet.events import BlocksEvicted, BlocksStored
from trivet.hookspecs import hookimpl
from trivet.plan import Transfer
from trivet.provider import Provider
from trivet.roles import Allocation, CacheHit, CacheStats, KVGroup, KVLayout
from trivet_paged.cache import PagedCache
from trivet_paged.options import PagedOptions


class TwoGroupCache(PagedCache):
    """Layers with a window and layers without have tables of their own, with different block sizes; blocks of one pool
    per group. The second pool is a plain :class:`PagedCache` behind this one."""

    def configure(self, need: Any) -> KVLayout:
        full = tuple(s for s in need.specs if s.window is None)
        windowed = tuple(s for s in need.specs if s.window is not None)
        self.other = PagedCache(None, PagedOptions(block_size=3))
        first, second = super().configure(_only(need, full)), self.other.configure(_only(need, windowed))
        groups = (
            KVGroup(0, tuple(s.layer for s in full), "full", self.block_size),
            KVGroup(1, tuple(s.layer for s in windowed), "sliding", 3, windowed[0].window),
        )
        return KVLayout(need.specs, groups, first.storage + second.storage)

    def extend(self, slots: Any, totals: Any, reserve: Any = None) -> Allocation:
        # A row gets its blocks in both groups or in none.
        rows = min(_affordable(cache, slots, totals) for cache in (self, self.other))
        one, two = super().extend(slots[:rows], totals[:rows]), self.other.extend(slots[:rows], totals[:rows])
        return Allocation(rows, one.slots + two.slots, one.blocks + two.blocks)

    def fits(self, num_tokens: int) -> bool:
        return super().fits(num_tokens) and self.other.fits(num_tokens)

    def tables(self, slot: int) -> list[Any]:
        return super().tables(slot) + self.other.tables(slot)

    def retire(self, slot: int) -> int:
        lease, other = super().retire(slot), self.other.retire(slot)
        assert lease == other
        return lease

    def lease(self, blocks: Any) -> int:
        lease, other = super().lease(blocks[:1]), self.other.lease(blocks[1:])
        assert lease == other
        return lease

    def settle(self, lease: int) -> None:
        super().settle(lease)
        self.other.settle(lease)

    def stats(self) -> CacheStats:
        counts = [(s.total, s.free, s.used, s.retired, s.leased) for s in (super().stats(), self.other.stats())]
        return CacheStats(*map(sum, zip(*counts, strict=True)))

    def check_integrity(self) -> None:
        super().check_integrity()
        self.other.check_integrity()


class ForkingCache(PagedCache):
    """Children share the parent's full blocks and get a copy of the last one."""

    can_fork = True

    def fork(self, parent: int, child: int, num_tokens: int) -> Allocation | None:
        blocks = self._ledger.blocks(parent)[: -(-num_tokens // self.block_size)].tolist()
        copies = []
        if num_tokens % self.block_size:
            if not self._free:
                return None
            copies = [(blocks[-1], self._free.popleft())]
            blocks[-1] = copies[0][1]
        self._ledger.append(child, blocks)
        return Allocation(1, [[child] * len(blocks)], [blocks], copies=[copies])


class TaggedCache(PagedCache):
    """Finds prompts again, whole blocks at a time, if their context tags are the same; keeps them until
    :meth:`reset`."""

    wants_commits = has_events = True

    def bind(self, context: Any) -> None:
        self._table, self._known, self._kept, self.hits = context.table, {}, [], 0
        self._events: Any = ([], [])

    def _key(self, request: Any, tokens: Any) -> tuple[Any, ...]:
        return (tuple(sorted(request.cache_tags.items())), tokens.tobytes())

    def admit(self, slot: int, request: Any) -> CacheHit:
        tokens, size, blocks = self._table.known_tokens(request), self.block_size, []
        if getattr(request.params, "prompt_logprobs", None) is not None:
            return CacheHit()  # its prompt's logits are wanted, so all of it must be computed
        while (end := (len(blocks) + 1) * size) < len(tokens) and (
            key := self._key(request, tokens[:end])
        ) in self._known:
            blocks.append(self._known[key])
        self._ledger.append(slot, blocks)
        self.hits += len(blocks) * size
        return CacheHit(len(blocks) * size)

    def commit(self, slots: Any, num_tokens: Any) -> None:
        for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True):
            request, blocks = self._table.requests[slot], self._ledger.blocks(slot)
            for end in range(self.block_size, count + 1, self.block_size):
                key = self._key(request, self._table.tokens[slot, :end])
                if key not in self._known:
                    self._known[key] = int(blocks[end // self.block_size - 1])
                    self._kept.append(self._ledger.lease([self._known[key]]))
                    self._events[0].append(BlocksStored(0, [self._known[key]], [key[1]]))

    def take_events(self) -> Any:
        events, self._events = self._events, ([], [])
        return events

    def reset(self) -> bool:
        self._events[1].append(BlocksEvicted(0, [], cleared=True))
        self._known.clear()
        while self._kept:
            self.settle(self._kept.pop())
        return super().reset()


def _affordable(cache: PagedCache, slots: Any, totals: Any) -> int:
    missing = np.maximum(-(-totals // cache.block_size) - cache._ledger.length[slots], 0)
    return int((missing.cumsum() <= len(cache._free)).sum())


class StoringCache(PagedCache):
    """Stores the first block of every request as soon as it is final, and keeps it until it is stored."""

    wants_commits = True

    def bind(self, context: Any) -> None:
        self._table, self._seen, self._stores = context.table, set(), []
        self._kept: dict[int, int] = {}
        self.ended: list[bool] = []

    def commit(self, slots: Any, num_tokens: Any) -> None:
        for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True):
            epoch = int(self._table.epoch[slot])
            if count >= self.block_size and epoch not in self._seen:
                self._seen.add(epoch)
                blocks = self._ledger.blocks(slot)[:1]
                named = (slot, epoch) if epoch % 2 else (-1, -1)  # a tier's blocks need not be one request's
                store = Transfer(-1, "shelf", *named, 0, self.block_size, [blocks])
                self._kept[id(store)] = self._ledger.lease(blocks.tolist())
                self._stores.append(store)

    def take_stores(self) -> list[Transfer]:
        stores, self._stores = self._stores, []
        return stores

    def transfer_ended(self, transfer: Transfer, *, ok: bool) -> None:
        self.settle(self._kept.pop(id(transfer)))
        self.ended.append(ok)


def _only(need: Any, specs: Any) -> Any:
    from dataclasses import replace

    return replace(need, specs=specs, support=need.support[: len(specs)])


@hookimpl
def trivet_providers() -> list[Provider]:
    options = "trivet_paged.options:PagedOptions"
    return [
        Provider("cache", "two_groups", "caches:TwoGroupCache", options),
        Provider("cache", "forking", "caches:ForkingCache", options),
        Provider("cache", "storing", "caches:StoringCache", options),
        Provider("cache", "tagged", "caches:TaggedCache", options),
    ]
