"""Blocks on demand, shared where contents are equal (PagedAttention, Kwon et al., SOSP 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trivet.errors import PluginError
from trivet.events import BlocksEvicted, BlocksStored
from trivet.ledger import BlockLedger
from trivet.plan import Int32, Int64, Transfer
from trivet.roles import Allocation, Cache, CacheHit, CacheRequirements, CacheStats, CacheTier, KVLayout
from trivet.rows import cells
from trivet.sizing import choose_block_size, plan_blocks, with_dtype
from trivet_paged.groups import Group, alike, plan_groups
from trivet_paged.hashing import Hasher
from trivet_paged.lookup import Found, Lookup
from trivet_paged.pool import BlockPool, EventLog
from trivet_paged.sharing import PrefixSharing
from trivet_paged.tiers import TierTraffic

if TYPE_CHECKING:
    from trivet.context import Context, EngineContext
    from trivet.state import Request
    from trivet_paged.options import PagedOptions


class PagedCache(Cache):
    """Block tables over one pool for all KV groups, with a prefix cache.

    A block that is full of committed tokens is named by a hash over everything before it, and found under that name
    until it is reused; blocks of ended requests are reused tail first, so that tails go before the heads that others
    share. Groups with a window give blocks back as soon as they have left it.

    Raises PluginError for tiers without prefix caching, which could never be of use."""

    can_fork = True

    def __init__(self, context: Context | None, options: PagedOptions) -> None:
        self._options = options
        self._caching = options.prefix_caching
        if context is not None and not self._caching and context.selected("cache_tier"):
            raise PluginError(
                "plugins.cache_tier: a tier finds blocks by the names that prefix caching gives them, and "
                "plugins.cache.prefix_caching is false; set it to true, or leave the tier out"
            )
        self.has_events = self._caching
        self._tiers: TierTraffic | None = None
        self._sharing: PrefixSharing | None = None
        self._queries = self._hits = self._tier_hits = 0

    def configure(self, need: CacheRequirements) -> KVLayout:
        """See :meth:`Cache.configure`."""
        need = with_dtype(self._options.dtype, need)
        size = choose_block_size(self._options.block_size, need.support)
        plan = plan_groups(need.specs, need.support, size)
        self._groups, self.block_size, self._in_flight = plan.groups, size, need.max_tokens_in_flight
        blocks = plan_blocks(
            need,
            size,
            memory=self._options.memory,
            num_blocks=self._options.num_blocks,
            page_bytes=plan.page_bytes,
            blocks_for=self.request_blocks,
            keeps_content=self._caching,
        )
        self._alike = alike(plan.groups)
        self.wants_commits = self._caching or any(group.windowed for group in plan.groups)
        self._ledger = BlockLedger(
            blocks, need.max_num_seqs, [-(-need.max_model_len // group.size) for group in plan.groups]
        )
        self._hasher = Hasher(size)
        self._events = EventLog()
        self._chains: dict[int, list[bytes]] = {}
        #: tokens looked up, found, and of these in tiers, by slots that have no blocks for the rest yet
        self._asked: dict[int, tuple[int, int, int]] = {}
        #: blocks of the smallest size that are named already, or were found, by slot
        self._named: Int32 = np.zeros(need.max_num_seqs, np.int32)
        #: leading entries that were given back because they left the window, by group and slot
        self._passed: Int32 = np.zeros((len(plan.groups), need.max_num_seqs), np.int32)
        return KVLayout(need.specs, tuple(group.kv for group in plan.groups), plan.storage(blocks))

    def bind(self, context: EngineContext) -> None:
        """See :meth:`Cache.bind`."""
        self._table = context.table
        # Not before the workers have found room for so many blocks: a plan that is never carried out costs nothing.
        self._pool = BlockPool(self._ledger.num_blocks, len(self._groups))
        self._lookup = Lookup(self._groups, self._pool, ())
        tiers: Sequence[CacheTier] = context.all("cache_tier")
        if self._caching:
            self._sharing = PrefixSharing(context, self.block_size)
            if tiers:
                self._tiers = TierTraffic(tiers, self._groups)
                self._lookup = Lookup(self._groups, self._pool, tiers)

    def fits(self, num_tokens: int) -> bool:
        """See :meth:`Cache.fits`."""
        return self.request_blocks(num_tokens) < self._ledger.num_blocks

    def request_blocks(self, num_tokens: int) -> int:
        """See :meth:`Cache.request_blocks`."""
        return sum(group.most_blocks(num_tokens, self._in_flight) for group in self._groups)

    # ------------------------------------------------------------------ admission

    def admit(self, slot: int, request: Request) -> CacheHit:
        """See :meth:`Cache.admit`."""
        self._named[slot] = 0
        self._passed[:, slot] = 0
        if not self._caching:
            return CacheHit()
        assert self._sharing is not None
        known = int(self._table.num_known[slot])
        chain = self._hasher.chain(request, self._table.tokens[slot], known)
        self._chains[slot] = chain
        count = known // self.block_size
        if self._table.whole_prompt[slot]:
            return CacheHit()
        if len(chain) > count:
            chain = chain[:count]
        found = self._lookup.longest(chain, known - 1)
        if not self._affordable(found, known):
            # It will not get in, so what it would share keeps its place in the order of reuse.
            return CacheHit()
        ready = min([found.num_tokens, *(i * self._groups[g].size for g, i, _ in found.loads)]) // self.block_size
        if self._sharing.wait(request, chain, ready, known):
            return CacheHit()
        loads = self._enter(slot, request, found)
        self._asked[slot] = known, found.num_tokens, found.num_tokens - ready * self.block_size
        self._sharing.lead(slot, chain, ready)
        return CacheHit(found.num_tokens, loads)

    def _affordable(self, found: Found, known: int) -> bool:
        """Whether there can be blocks for the rest of the request; counts what it needs in any case."""
        more = len(found.loads)
        for group, entries in zip(self._groups, found.blocks, strict=True):
            wanted = -(-known // group.size)
            if group.windowed:
                wanted = min(wanted, group.first_block(found.num_tokens) + group.span(self._in_flight))
            more += max(wanted - len(entries), 0)
        return more + self._num_idle(found) <= self._pool.num_free

    def _num_idle(self, found: Found) -> int:
        return sum(len(self._idle(entries)) for entries in found.blocks)

    def _idle(self, entries: Sequence[int]) -> list[int]:
        """Those of the entries that are free at present."""
        blocks = np.array([block for block in entries if block > 0], np.int32)
        return blocks[self._ledger.is_idle(blocks)].tolist() if len(blocks) else []

    def _enter(self, slot: int, request: Request, found: Found) -> list[Transfer]:
        """Put what was found into the slot's tables, and fresh blocks where something has to be loaded."""
        for entries in found.blocks:
            self._pool.claim(self._idle(entries))
        if found.loads:
            assert self._tiers is not None
            # Before anything is evicted to make room: what is to be loaded must not make room for that in its tier.
            claims = self._tiers.claim(found, self._chains[slot])
            for (group, index, _), block in zip(found.loads, self._take(len(found.loads)), strict=True):
                found.blocks[group][index] = block
        for group, entries in enumerate(found.blocks):
            if entries:
                self._ledger.append(slot, entries, group)
                self._passed[group, slot] = self._groups[group].first_block(found.num_tokens)
        self._named[slot] = found.num_tokens // self.block_size
        if not found.loads:
            return []
        assert self._tiers is not None
        assert self._sharing is not None
        self._sharing.loading.add(slot)
        return self._tiers.load(slot, request.epoch, found, claims, self._chains[slot])

    def extend(self, slots: Int32, totals: Int32, reserve: Int32 | None = None) -> Allocation:
        """See :meth:`Cache.extend`; rows that need no block cost no Python."""
        at = slots.astype(np.intp)
        slots_of: list[list[int]] = [[] for _ in self._groups]
        blocks_of: list[list[int]] = [[] for _ in self._groups]
        missing = [self._missing(groups[0], at, totals, reserve) for groups in self._alike]
        needed = missing[0] * len(self._alike[0])
        for lacking, groups in zip(missing[1:], self._alike[1:], strict=True):
            needed += lacking * len(groups)
        rows = needed.nonzero()[0]
        if not len(rows):
            self._got_in(slots)
            return Allocation(len(slots), slots_of, blocks_of)
        done, total = len(slots), int(np.add.reduce(needed))
        if total > self._pool.num_free:
            fitting = int(np.searchsorted(needed[rows].cumsum(), self._pool.num_free, side="right"))
            done, rows = int(rows[fitting]), rows[:fitting]
            total = int(np.add.reduce(needed[rows]))
        blocks, start = self._take(total), 0
        for lacking, groups in zip(missing, self._alike, strict=True):
            counts = lacking[rows]
            mine = counts.nonzero()[0]
            if not len(mine):
                continue
            each = int(np.add.reduce(counts))
            indices = [group.index for group in groups]
            taken = blocks[start : start + each * len(groups)]
            owners = self._ledger.append_rows(at[rows[mine]], counts[mine], taken, indices).tolist()
            for index in indices:
                slots_of[index], blocks_of[index] = owners, blocks[start : start + each]
                start += each
        self._got_in(slots[:done])
        return Allocation(done, slots_of, blocks_of)

    def _got_in(self, slots: Int32) -> None:
        """Rows have the blocks that they need: what was found for those among them that are new counts now. Who lacks
        memory asks again and again."""
        if self._asked:
            for slot in self._asked.keys() & set(slots.tolist()):
                known, hits, loaded = self._asked.pop(slot)
                self._queries += known
                self._hits += hits
                self._tier_hits += loaded

    def _missing(self, group: Group, slots: Int64, totals: Int32, reserve: Int32 | None) -> Int32:
        """Blocks that rows lack in a group."""
        wanted = totals
        if reserve is not None:
            wanted = self._ahead(group, slots, totals, reserve) if group.windowed else reserve
        lacking: Int32 = np.maximum(
            (wanted + (group.size - 1)) // group.size - self._ledger.lengths[group.index][slots], 0
        )
        return lacking

    def _ahead(self, group: Group, slots: Int64, totals: Int32, reserve: Int32) -> Int32:
        """Tokens that a windowed group takes blocks for: as many as it will ever have at once. From then on it gives a
        block back for every one it takes, so it never needs what others have."""
        most = (self._passed[group.index, slots] + group.span(self._in_flight)) * group.size
        ahead: Int32 = np.maximum(totals, np.minimum(reserve, most))
        return ahead

    def _take(self, count: int) -> list[int]:
        evicted: list[tuple[int, bytes, int]] = []
        blocks = self._pool.take(count, evicted)
        if evicted:
            if self.observed:
                for group, digest, _ in evicted:
                    self._events.evicted(group, digest)
            if self._tiers is not None:
                self._tiers.offer(evicted)
        return blocks

    def fork(self, parent: int, child: int, num_tokens: int) -> Allocation | None:
        """See :meth:`Cache.fork`."""
        ledger = self._ledger
        tables: list[list[int]] = []
        for group in self._groups:
            entries = ledger.blocks(parent, group.index)[: -(-num_tokens // group.size)].tolist()
            first = group.first_block(num_tokens)
            if not all(entries[first:]):
                return None  # the parent's window has moved on
            tables.append([0] * first + entries[first:])
        partly = [group.index for group in self._groups if num_tokens % group.size]
        if len(partly) > self._pool.num_free:
            return None
        copies: list[list[tuple[int, int]]] = [[] for _ in self._groups]
        for index, block in zip(partly, self._take(len(partly)), strict=True):
            copies[index].append((tables[index][-1], block))
            tables[index][-1] = block
        for one, entries in zip(self._groups, tables, strict=True):
            ledger.append(child, entries, one.index)
            self._passed[one.index, child] = one.first_block(num_tokens)
        self._named[child] = num_tokens // self.block_size
        if self._caching:
            request = self._table.requests[child]
            assert request is not None
            self._chains[child] = self._hasher.chain(request, self._table.tokens[child], num_tokens)
        return Allocation(1, [[] for _ in tables], [[] for _ in tables], copies)

    # ------------------------------------------------------------------ commit

    def commit(self, slots: Int32, num_tokens: Int32) -> None:
        """See :meth:`Cache.commit`; rows that complete no block cost no Python."""
        at = slots.astype(np.intp)
        if self._caching:
            full = num_tokens // self.block_size
            rows = (full > self._named[at]).nonzero()[0]
            if len(rows):
                self._name(at[rows], full[rows])
        for groups in self._alike:
            if not groups[0].windowed:
                continue
            indices = [group.index for group in groups]
            passed, first = self._passed[indices[0]], groups[0].first_block(num_tokens)
            rows = (first > passed[at]).nonzero()[0]
            if len(rows):
                mine, stops = at[rows], first[rows]
                self._pool.give(self._ledger.drop(mine, indices, passed[mine], stops))
                for index in indices:
                    self._passed[index, mine] = stops

    def _name(self, slots: Int64, full: Int32) -> None:
        """Blocks up to the ``full[i]``-th of ``slots[i]`` can be found from now on."""
        done, numbers, counts = self._named[slots], slots.tolist(), full.tolist()
        chains = [self._chains[slot] for slot in numbers]
        for slot, chain, count in zip(numbers, chains, counts, strict=True):
            if len(chain) < count:
                tokens = self._table.tokens[slot, len(chain) * self.block_size : count * self.block_size]
                self._hasher.extend(chain, self._table.requests[slot], tokens)
        places: dict[int, tuple[Int64, Int64, list[bytes]]] = {}
        for group in self._groups:
            factor = group.factor
            if factor not in places:
                first = done // factor
                rows, indices = cells(np.arange(len(slots)), first, full // factor - first)
                ends = ((indices + 1) * factor - 1).tolist()
                digests = [chains[row][end] for row, end in zip(rows.tolist(), ends, strict=True)]
                places[factor] = slots[rows], indices, digests
            owners, indices, digests = places[factor]
            blocks = self._ledger.tables[group.index][owners, indices].tolist()
            stored = self._pool.name(group.index, digests, blocks)
            if stored and self.observed:
                self._tell_stored(group, owners[stored].tolist(), indices[stored].tolist())
        self._named[slots] = full
        assert self._sharing is not None
        self._sharing.advanced(numbers, counts)

    def _tell_stored(self, group: Group, slots: list[int], indices: list[int]) -> None:
        """Blocks of the tables of ``slots`` at ``indices`` became findable: an event per stretch of one table."""
        size, factor = group.size, group.factor
        start = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and (slots[end], indices[end]) == (slots[end - 1], indices[end - 1] + 1):
                continue
            slot, first, last = slots[start], indices[start], indices[end - 1] + 1
            start = end
            chain, request = self._chains[slot], self._table.requests[slot]
            assert request is not None
            detail = {
                "block_size": size,
                "parent": chain[first * factor - 1] if first else None,
                "token_ids": self._table.tokens[slot, first * size : last * size].tolist(),
                "tags": dict(request.cache_tags),
            }
            blocks: list[int] = self._ledger.tables[group.index][slot, first:last].tolist()
            digests = [chain[(i + 1) * factor - 1] for i in range(first, last)]
            self._events.stored(BlocksStored(group.index, blocks, digests, detail))

    # ------------------------------------------------------------------ leaving

    def tables(self, slot: int) -> list[Int32]:
        """See :meth:`Cache.tables`."""
        return [self._ledger.blocks(slot, group.index) for group in self._groups]

    def retire(self, slot: int) -> int:
        """See :meth:`Cache.retire`."""
        self._chains.pop(slot, None)
        self._asked.pop(slot, None)
        if self._tiers is not None:
            self._tiers.withdraw(slot)
        if self._sharing is not None:
            self._sharing.loading.discard(slot)
            self._sharing.leave(slot)
        return self._ledger.retire(slot)

    def lease(self, blocks: Sequence[Int32]) -> int:
        """See :meth:`Cache.lease`."""
        return self._ledger.lease(block for group in blocks for block in group.tolist())

    def settle(self, lease: int) -> None:
        """See :meth:`Cache.settle`."""
        self._pool.give(self._ledger.settle(lease))

    # ------------------------------------------------------------------ transfers

    def take_stores(self) -> list[Transfer]:
        """See :meth:`Cache.take_stores`."""
        if self._sharing is not None:
            self._sharing.sweep()
        return [] if self._tiers is None else self._tiers.take_stores()

    def invalidate(self, blocks: Sequence[Int32]) -> list[tuple[int, int]]:
        """See :meth:`Cache.invalidate`."""
        bad = {block for group in blocks for block in np.asarray(group).tolist() if block}
        for block in bad:
            lost = self._pool.forget(block)
            if lost is not None and self.observed:
                self._events.evicted(*lost)
        if self._tiers is not None:
            self._tiers.damaged(bad)
        valid: dict[int, int] = {}
        for slot, group, index in self._ledger.holders(bad):
            valid[slot] = min(valid.get(slot, index * self._groups[group].size), index * self._groups[group].size)
        for slot, tokens in valid.items():
            self._named[slot] = min(int(self._named[slot]), tokens // self.block_size)
        return list(valid.items())

    def transfer_ended(self, transfer: Transfer, *, ok: bool) -> None:
        """See :meth:`Cache.transfer_ended`; what a tier loaded can be found from now on."""
        if self._tiers is None:
            return
        for group, digest, block in self._tiers.ended(transfer, ok=ok):
            if self._pool.name(group, [digest], [block]) and self.observed:
                detail = {"block_size": self._groups[group].size, "tier": transfer.endpoint}
                self._events.stored(BlocksStored(group, [block], [digest], detail))
        slot = transfer.slot
        assert self._sharing is not None
        if slot in self._sharing.loading and not self._tiers.is_loading(slot, int(self._table.epoch[slot])):
            self._sharing.loading.discard(slot)
            self._sharing.advanced([slot], [int(self._named[slot])])

    def persist(self, limit: int) -> bool:
        """See :meth:`Cache.persist`."""
        return self._tiers is not None and self._tiers.persist(self._pool.kept(), limit)

    def take_events(self) -> tuple[list[BlocksStored], list[BlocksEvicted]]:
        """See :meth:`Cache.take_events`."""
        return self._events.take()

    # ------------------------------------------------------------------ the whole

    def reset(self) -> bool:
        """See :meth:`Cache.reset`; what tiers hold is forgotten too."""
        if not self._ledger.idle:
            return False
        self._pool.clear()
        if self._tiers is not None:
            self._tiers.reset()
        if self.observed:
            self._events.cleared(len(self._groups))
        return True

    def stats(self) -> CacheStats:
        """See :meth:`Cache.stats`."""
        return replace(
            self._ledger.stats(),
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            tier_hits=self._tier_hits,
            evicted=self._pool.num_evicted,
        )

    def check_integrity(self) -> None:
        """See :meth:`Role.check_integrity`."""
        self._ledger.check_integrity(self._pool.free_blocks())
        self._pool.check_integrity()
        if self._sharing is not None:
            self._sharing.check_integrity()
        if self._tiers is not None:
            self._tiers.check_integrity()
