"""The model's checks, and the transfers between a cache and its tiers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trivet.context import Hold
from trivet.plan import EMPTY_I32, Int32, Transfer
from trivet.roles import Allocation, Cache, CacheHit, CacheStats, KVLayout
from trivet.state import RequestTable
from trivet.testing.suites._base import require
from trivet.testing.suites._cache_memory import Block, Memory
from trivet.testing.suites._cache_names import Cell, Group, Live
from trivet.testing.suites._cache_tier import NaiveTier


@dataclass(slots=True)
class _Load:
    """A load that the engine has started."""

    transfer: Transfer
    lease: int
    filling: set[Block]


class CacheChecks(ABC):
    """State of the model, what must hold of it at any time, and what the workers do about transfers."""

    def __init__(
        self,
        cache: Cache,
        layout: KVLayout,
        table: RequestTable,
        *,
        on_demand: bool,
        tiers: Sequence[NaiveTier],
        seed: int,
    ) -> None:
        self.cache, self.table, self.on_demand = cache, table, on_demand
        self.tiers = {tier.endpoint: tier for tier in tiers}
        self.memory = Memory(layout)
        self.memory.holders = self._holders
        self.groups = self.memory.groups
        self.windowed = any(g.window is not None for g in self.groups)
        cache.observed = cache.has_events
        self.live: dict[int, Live] = {}
        self.tables: dict[int, list[list[int]]] = {}
        #: lease → (whether it is of a retired table, block → its cells then)
        self.leases: dict[int, tuple[bool, dict[Block, list[Cell]]]] = {}
        self.held: dict[str, Hold] = {}
        self.loads: list[_Load] = []
        self.stores: list[tuple[Transfer, int, bool]] = []
        self._copies: list[tuple[Block, Block, int]] = []
        self._count = 0
        self.damaged: set[Block] = set()  # nobody relies on these any more
        self._open = False  # more admissions are to follow in the plan
        self._zeroing: list[Block] = []
        self._rng = random.Random(seed)
        self.hits = self.tier_hits = self.num_stored = self.num_failed = 0

    # ------------------------------------------------------------------ admission

    def _look_up(self, slot: int, live: Live) -> CacheHit | None:
        """None when the cache holds the request instead."""
        known = live.request.num_known
        stats = self.cache.stats()
        contents = [cells for tier in self.tiers.values() for cells in tier.content.values()]
        # What a tier took in this very plan is known by its key only.
        elsewhere = None if None in contents else {cells[-1] for cells in contents if cells}
        hit = self.cache.admit(slot, live.request)
        require(
            0 <= hit.num_tokens < known,
            "at least the last known token is never counted as found",
            Cache.admit,
            found_tokens=hit.num_tokens,
            known_tokens=known,
        )
        if live.request.holds:
            require(not any(map(len, self.read(slot))), "a request that is held has no blocks", Cache.admit, slot=slot)
            return None
        require(
            not hit.num_tokens or not self.table.prompt_logprobs[slot],
            "nothing is found for a request with prompt_logprobs",
            Cache.admit,
            found_tokens=hit.num_tokens,
        )
        require(self.tiers or not hit.loads, "without a cache tier there is nothing to load", Cache.admit)
        for group, blocks in zip(self.groups, self.read(slot), strict=True):
            first = group.first(hit.num_tokens) // group.size
            require(
                len(blocks) * group.size >= hit.num_tokens and all(blocks[first:]),
                "tokens that were found are covered by blocks already in the slot's table",
                Cache.admit,
                found_tokens=hit.num_tokens,
                blocks=blocks,
                block_size=group.size,
            )
        if self.cache.has_events and elsewhere is not None and not self.table.prompt_logprobs[slot]:
            self._check_hit(live, hit, stats, elsewhere)
        self.hits += hit.num_tokens
        return hit

    def _check_hit(self, live: Live, hit: CacheHit, stats: CacheStats, elsewhere: set[Cell]) -> None:
        """The events say exactly what can be found."""
        known = live.request.num_known
        length = self.memory.longest(live.names, known - 1, elsewhere)
        if hit.num_tokens == length:
            return
        # Nothing is taken for a request that cannot get in.
        needed = self.memory.needed(live.names, length)
        busy = {block for tables in self.tables.values() for block in self._ids(tables)}
        busy |= {block for _, cells in self.leases.values() for block in cells}
        fresh = sum(self.memory.findable.get(key) not in busy for key in needed)
        full = sum(-(-known // g.size) - length // g.size for g in self.groups)
        require(
            hit.num_tokens == 0 and fresh + full > stats.free,
            "what events and tiers say is there is found as far as memory goes, and nothing else",
            Cache.admit,
            found_tokens=hit.num_tokens,
            there=length,
            free=stats.free,
            needed=fresh + full,
        )

    # ------------------------------------------------------------------ blocks

    def extend(self, slots: Sequence[int], totals: Sequence[int], reserve: Sequence[int] | None = None) -> int:
        """Blocks for rows; returns how many rows have them. Compares what is reported with the tables."""
        before = {slot: self.read(slot) for slot in slots}
        free = self.cache.stats().free
        taken = {block for tables in self.tables.values() for block in self._ids(tables)}
        taken |= {block for _, cells in self.leases.values() for block in cells}
        kept = list(totals if reserve is None else reserve)
        got = self.cache.extend(
            np.array(slots, np.int32), np.array(totals, np.int32), None if reserve is None else np.array(kept, np.int32)
        )
        self.note(got, -1)
        require(0 <= got.rows <= len(slots), "rows counts leading rows", Allocation, rows=got.rows)
        for row, slot in enumerate(slots):
            tables = self.read(slot)
            for group, old, new in zip(self.groups, before[slot], tables, strict=True):
                added = new[len(old) :]
                require(
                    new[: len(old)] == old,
                    "tables are append-only: an entry never changes, except to the null block when it leaves a window",
                    Cache,
                    before=old,
                    after=new,
                )
                if row < got.rows:
                    total = kept[row] if group.window is None else totals[row]
                    covered = len(new) * group.size >= total
                    require(covered, "a row within `rows` covers its tokens", Cache.extend, table=new, tokens=total)
                else:
                    require(
                        not added, "rows that got no memory are left as they were", Cache.extend, before=old, after=new
                    )
                reported = [
                    b for s, b in zip(got.slots[group.index], got.blocks[group.index], strict=True) if s == slot
                ]
                require(
                    reported == added,
                    "slots and blocks list one entry per appended block, in row order",
                    Allocation,
                    reported=reported,
                    appended=added,
                )
                for block in added:
                    require(
                        block != 0 and (group.pool, block) not in taken,
                        "an appended block is one that no table and no lease needs",
                        Cache.extend,
                        block=block,
                        slot=slot,
                    )
                    taken.add((group.pool, block))
            self.tables[slot] = tables
        if self.on_demand and got.rows < len(slots):
            slot, total = slots[got.rows], kept[got.rows]
            need = sum(max(-(-total // g.size) - len(t), 0) for g, t in zip(self.groups, before[slot], strict=True))
            used = sum(len(blocks) for blocks in got.blocks)
            require(
                need > free - used,
                "a cache that takes blocks on demand refuses a row only when too few are free",
                Cache.extend,
                needed=need,
                free=free - used,
            )
        self.sync()
        return got.rows

    def note(self, got: Allocation, slot: int) -> None:
        """Copies and zeroing, to be done once the plan's stores have been read."""
        for group in self.groups:
            for block in got.zeroing[group.index] if got.zeroing else ():
                self._zeroing.append((group.pool, block))
            for source, target in got.copies[group.index] if got.copies else ():
                self._copies.append(((group.pool, source), (group.pool, target), slot))

    def flush(self) -> None:
        """The plan ends: stores that block are read, then blocks are copied, then loads that block are written."""
        self._open = False
        for store, lease, ok in self.stores:
            self.cache.transfer_ended(store, ok=ok)
            self.cache.settle(lease)
        self.stores.clear()
        for store in self.cache.take_stores():
            self._store(store)
        for block in self._zeroing:
            self.memory.zero(block)
        for source, target, slot in self._copies:
            self.memory.copy(source, target, slot)
        self._zeroing.clear()
        self._copies.clear()
        self.sync()
        while load := next((load for load in self.loads if load.transfer.blocking), None):
            self.end_load(load, self._rng.choice((0.0, 0.0, 0.0, 0.2)), named=self._rng.random() < 0.8)
        idle = not self.table.in_flight.any() and not self.loads
        require(
            not idle or not self.held, "nobody waits for requests that make no progress", Cache.admit, held=self.held
        )
        self.check()

    # ------------------------------------------------------------------ transfers

    def _store(self, store: Transfer) -> None:
        tier = self.tiers[store.endpoint]
        require(store.blocking, "blocks that are evicted are read before anything is written", Cache.take_stores)
        self._count += 1
        store.transfer_id = self._count
        ok = self._rng.random() < 0.9
        for group, block, key in self._pairs(store):
            place = (group.pool, block)
            self.memory.content(group, place)
            if ok and key in tier.content:
                tier.content[key] = list(self.memory.cells(place)[: group.size])
                self.num_stored += 1
        self.stores.append((store, self.cache.lease([EMPTY_I32 for _ in self.groups]), ok))

    def _pairs(self, transfer: Transfer) -> list[tuple[Group, int, bytes]]:
        blocks = [(g, int(b)) for g, row in zip(self.groups, transfer.blocks, strict=True) for b in row.tolist()]
        require(
            len(blocks) == len(transfer.keys)
            and all(bool(block) == bool(key) for (_, block), key in zip(blocks, transfer.keys, strict=True)),
            "keys name the blocks, one each, group after group; the null block has an empty one",
            Transfer,
            blocks=blocks,
            keys=transfer.keys,
        )
        return [(g, block, key) for (g, block), key in zip(blocks, transfer.keys, strict=True) if block]

    def start_loads(self, slot: int, live: Live, loads: Sequence[Transfer]) -> None:
        """What admission asked for is under way."""
        for transfer in loads:
            require(
                (transfer.slot, transfer.epoch) == (slot, live.request.epoch),
                "a load belongs to an admission",
                Transfer,
                slot=transfer.slot,
            )
            filling = set()
            for group, row in zip(self.groups, transfer.blocks, strict=True):
                start = transfer.start_token // group.size
                table = self.tables[slot][group.index][start : start + len(row)]
                require(
                    transfer.start_token % group.size == 0
                    and all(b in (0, t) for b, t in zip(row.tolist(), table, strict=True)),
                    "a load's blocks are a stretch of the table",
                    CacheHit,
                    blocks=row,
                    table=table,
                )
                filling |= {(group.pool, b) for b in row.tolist() if b}
            self._count += 1
            transfer.transfer_id = self._count
            lease = self.cache.lease(transfer.blocks)
            self.loads.append(_Load(transfer, lease, filling))
            self.leases[lease] = False, {block: [] for block in filling}
            live.loading += 1
            self.tier_hits += 1

    def end_load(self, load: _Load, lost: float = 0.0, *, named: bool = True) -> None:
        """A load ends on the workers; with the probability ``lost`` each block is damaged."""
        transfer, tier = load.transfer, self.tiers[load.transfer.endpoint]
        self.loads.remove(load)
        bad: list[list[int]] = [[] for _ in self.groups]
        for group, block, key in self._pairs(transfer):
            cells, place = tier.content.get(key), (group.pool, block)
            self.memory.may_be_written(place, transfer.slot if self.is_live(transfer.slot, transfer.epoch) else -1)
            if cells is None or self._rng.random() < lost:
                bad[group.index].append(block)
                self.memory.spoil(place)
                self.damaged.add(place)
                continue
            for offset, cell in enumerate(cells):
                self.memory.write(
                    place, offset, cell, transfer.slot if self.is_live(transfer.slot, transfer.epoch) else -1
                )
        failed = any(bad)
        self.num_failed += failed
        if failed and named:
            self.lose(bad, transfer.slot if self.is_live(transfer.slot, transfer.epoch) else -1)
        self.cache.transfer_ended(transfer, ok=not failed)
        self.cache.settle(load.lease)
        del self.leases[load.lease]
        if self.is_live(transfer.slot, transfer.epoch):
            live = self.live[transfer.slot]
            live.loading -= 1
            if failed:
                # The table was made for this content: the request is admitted anew.
                self.preempt(transfer.slot)
        self.damaged.clear()
        self.sync()
        self.check()

    def is_live(self, slot: int, epoch: int) -> bool:
        """Whether an admission still has its slot."""
        return bool(self.table.epoch[slot] == epoch)

    def lose(self, bad: Sequence[Sequence[int]], slot: int) -> None:
        """Blocks are damaged: the cache names who has them; they are preempted, all but ``slot``. The caller clears
        :attr:`damaged` when that one has been seen to."""
        named = self.cache.invalidate([np.array(blocks, np.int32) for blocks in bad])
        self.sync()
        self.damaged = {
            (g.pool, block) for g, blocks in zip(self.groups, bad, strict=True) for block in blocks if block
        }
        for place in self.damaged:
            self.memory.spoil(place)
            for _, cells in self.leases.values():
                if place in cells:
                    cells[place] = []
        for other, tokens in named:
            require(other in self.live, "invalidate names slots that have a table", Cache.invalidate, slot=other)
            if other == slot:
                self.rewind(other, tokens)
            elif int(self.table.num_computed[other]) > tokens:
                # Two requests must not both compute into one block.
                self.preempt(other)

    def rewind(self, slot: int, valid: int) -> None:
        """A request computes again what comes after ``valid`` tokens."""
        live = self.live[slot]
        live.computed, live.told = min(live.computed, valid), min(live.told, valid)
        self.table.num_computed[slot] = self.table.num_committed[slot] = live.computed

    @abstractmethod
    def preempt(self, slot: int) -> None:
        """A request loses its slot and comes back later."""

    def keep(self, lease: int, retired: bool, cells: dict[Block, list[Cell]]) -> int:
        """Remember what the blocks of a lease hold."""
        require(lease not in self.leases, "a lease id is not used again before it was settled", Cache.lease, id=lease)
        self.leases[lease] = retired, cells
        self.check()
        return lease

    # ------------------------------------------------------------------ what must hold at any time

    def sync(self) -> None:
        """Take over the cache's events."""
        if self.cache.has_events:
            self.memory.replay(*self.cache.take_events())

    def check(self) -> None:
        """Every live request finds what it needs, nothing that is kept has changed, blocks add up."""
        filling = self.damaged.union({target for _, target, _ in self._copies}, *(load.filling for load in self.loads))
        for slot, live in self.live.items():
            tables = self.read(slot)
            self._check_table(live, self.tables[slot], tables)
            self.tables[slot] = tables
            for group, table in zip(self.groups, tables, strict=True):
                for p in range(group.first(live.told), live.computed):
                    block = (group.pool, table[p // group.size])
                    if block in filling:
                        continue
                    cell = self.memory.cells(block)[p % group.size]
                    require(
                        block[1] and cell == (group.index, live.names[p]),
                        "the KV of a request's computed tokens stays in its blocks while it has a table, and what "
                        "admission finds is the KV of these very tokens and tags",
                        Cache,
                        request=live.request.request_id,
                        position=p,
                        block=block[1],
                        cell_holds=cell,
                        needed=live.names[p],
                    )
        for lease, (retired, cells) in self.leases.items():
            for block, then in cells.items():
                now = self.memory.cells(block)
                require(
                    not retired or all(t in (None, n) for n, t in zip(now, then, strict=False)),
                    "blocks of a retired table stay untouched until their lease is settled",
                    Cache.retire,
                    lease=lease,
                    block=block,
                )
        self._check_stats(self.cache.stats())
        self.cache.check_integrity()

    def _check_table(self, live: Live, old: list[list[int]], new: list[list[int]]) -> None:
        for group, before, after in zip(self.groups, old, new, strict=True):
            dead = group.first(live.told) // group.size
            ok = len(before) == len(after) and all(
                b == a or (a == 0 and i < dead) for i, (b, a) in enumerate(zip(before, after, strict=True))
            )
            require(
                ok,
                "tables are append-only: an entry never changes, except to the null block when it leaves a window",
                Cache,
                before=before,
                after=after,
                entries_outside_the_window=dead,
            )
            require(
                not self.on_demand or not any(after[:dead]),
                "blocks that have left the window are given back",
                Cache.commit,
                table=after,
                entries_outside_the_window=dead,
            )

    def _check_stats(self, stats: CacheStats) -> None:
        used = {b for tables in self.tables.values() for b in self._ids(tables)}
        retired = {b for r, cells in self.leases.values() if r for b in cells} - used
        leased = {b for r, cells in self.leases.values() if not r for b in cells} - used - retired
        require(
            stats.free + stats.used + stats.retired + stats.leased == stats.total,
            "free + used + retired + leased == total",
            Cache.stats,
            stats=stats,
        )
        require(
            (stats.used, stats.retired) == (len(used), len(retired)) and stats.leased >= len(leased),
            "a block is used while a live table holds it, else retired, else leased, else free",
            CacheStats,
            stats=stats,
            used=sorted(used),
            retired=sorted(retired),
            leased=sorted(leased),
        )

    # ------------------------------------------------------------------ tables

    def read(self, slot: int) -> list[list[int]]:
        """A slot's tables."""
        tables: list[Int32] = self.cache.tables(slot)
        require(
            len(tables) == len(self.groups) and all(t.dtype == np.int32 for t in tables),
            "tables are int32 arrays, one per KV group",
            Cache.tables,
            tables=tables,
        )
        return [t.tolist() for t in tables]

    def needed(self, slot: int) -> dict[Block, list[Cell]]:
        """Per block of a table the cells of computed tokens; None for the others."""
        live = self.live[slot]
        found: dict[Block, list[Cell]] = {}
        for group, table in zip(self.groups, self.tables[slot], strict=True):
            for index, block in enumerate(table):
                if block:
                    cells = found.setdefault((group.pool, block), [None] * group.size)
                    names = live.names[index * group.size : min((index + 1) * group.size, live.computed)]
                    cells[: len(names)] = [(group.index, name) for name in names]
        filling = self.damaged.union(*(load.filling for load in self.loads))
        return {block: [] if block in filling else cells for block, cells in found.items()}

    def _holders(self, block: Block, slot: int) -> list[str]:
        return [
            self.live[other].request.request_id
            for other, tables in self.tables.items()
            if other != slot and block in self._ids(tables)
        ]

    def _ids(self, tables: list[list[int]]) -> set[Block]:
        return {(g.pool, b) for g, table in zip(self.groups, tables, strict=True) for b in table if b}
