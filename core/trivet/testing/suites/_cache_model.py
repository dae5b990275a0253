"""A naive model of KV memory: every cell holds a name of all the tokens before it, every table is a plain list.

Whatever a cache provider does wrong with ids (a block given away twice, a wrong hit, a copy left out) makes a cell hold
another name than a request needs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trivet.plan import Int32
from trivet.roles import Allocation, Cache, CacheStats, KVLayout
from trivet.state import Request, RequestTable
from trivet.testing.suites._base import require

Cell = object


@dataclass(slots=True)
class Group:
    """A KV group; groups that share a buffer have one ``pool``, so that a block id means the same memory."""

    index: int
    size: int
    window: int | None
    pool: int


@dataclass(slots=True)
class Live:
    """A request with a table. ``names[p]`` is what the KV of position ``p`` must be."""

    request: Request
    names: list[Cell] = field(default_factory=list)
    computed: int = 0
    told: int = 0  #: tokens that ``commit`` was told of


def pools_of(layout: KVLayout) -> list[Group]:
    """The layout's groups, with the buffer that each of them keeps its first layer in."""
    buffer = {layer: i for i, storage in enumerate(layout.storage) for layer in storage.layers}
    return [Group(g.index, g.block_size, g.window, buffer[g.layers[0]]) for g in layout.groups]


class CacheModel:
    """Calls a cache as the engine does and checks its contract after every call."""

    def __init__(self, cache: Cache, layout: KVLayout, table: RequestTable, *, on_demand: bool) -> None:
        self.cache, self.table, self._on_demand = cache, table, on_demand
        self.groups = pools_of(layout)
        self.windowed = any(g.window is not None for g in self.groups)
        self.live: dict[int, Live] = {}
        self.tables: dict[int, list[list[int]]] = {}
        #: lease → (whether it is of a retired table, (pool, block) → its cells then)
        self.leases: dict[int, tuple[bool, dict[tuple[int, int], list[Cell]]]] = {}
        self._memory: dict[tuple[int, int], list[Cell]] = {}
        self._count = 0
        self.hits = 0

    # ------------------------------------------------------------------ what the engine does

    def admit(self, prompt: Sequence[int], tags: dict[str, bytes], max_total: int, parent: int | None = None) -> bool:
        """A request gets a slot and blocks for its prompt; False when memory is short. ``parent`` is forked."""
        self._count += 1
        request = Request(f"r{self._count}", np.array(prompt, np.int32), None, max_total, 0, index=self._count)
        request.cache_tags = tags
        slot = self.table.assign(request, (), 0)
        live = Live(request, names_of(prompt, tags))
        found = self._look_up(slot, live) if parent is None else self._fork(parent, slot, live)
        if found is None:
            self.cache.admit(slot, request)
            return self._give_up(slot)
        live.computed = live.told = found
        self.table.num_computed[slot] = self.table.num_committed[slot] = found
        self.live[slot] = live
        self.tables[slot] = self._read(slot)
        self.check()
        if not self.extend([slot], [len(prompt)]):
            del self.live[slot], self.tables[slot]
            return self._give_up(slot)
        return True

    def _give_up(self, slot: int) -> bool:
        self.cache.settle(self.cache.retire(slot))
        self.table.release(slot)
        self.check()
        return False

    def _look_up(self, slot: int, live: Live) -> int:
        hit = self.cache.admit(slot, live.request)
        known = live.request.num_prompt
        require(
            0 <= hit.num_tokens < known,
            "at least the last known token is never counted as found",
            Cache.admit,
            found_tokens=hit.num_tokens,
            known_tokens=known,
        )
        require(not hit.loads, "without a cache tier there is nothing to load from", Cache.admit, loads=hit.loads)
        for group, blocks in zip(self.groups, self._read(slot), strict=True):
            require(
                len(blocks) * group.size >= hit.num_tokens,
                "tokens that were found are covered by blocks already in the slot's table",
                Cache.admit,
                found_tokens=hit.num_tokens,
                blocks=blocks,
                block_size=group.size,
            )
        self.hits += hit.num_tokens
        return hit.num_tokens

    def _fork(self, parent: int, slot: int, live: Live) -> int | None:
        shared = live.request.num_prompt - 1
        got = self.cache.fork(parent, slot, shared)
        if got is None:
            return None
        self._apply(got)
        for group, own, theirs in zip(self.groups, self._read(slot), self.tables[parent], strict=True):
            full, partly = divmod(shared, group.size)
            first = 0 if group.window is None else max(0, (shared - group.window + 1) // group.size)
            require(
                own[first:full] == theirs[first:full] and len(own) * group.size >= shared,
                "a fork shares the parent's full blocks",
                Cache.fork,
                parent=theirs,
                child=own,
                tokens=shared,
            )
            require(
                not partly or own[full] != theirs[full],
                "a fork gets a copy of a last block that is partly filled",
                Cache.fork,
                parent=theirs,
                child=own,
                tokens=shared,
            )
        return shared

    def extend(self, slots: Sequence[int], totals: Sequence[int]) -> int:
        """Blocks for rows; returns how many rows have them. Compares what is reported with the tables."""
        before = {slot: self._read(slot) for slot in slots}
        free = self.cache.stats().free
        taken = {block for tables in self.tables.values() for block in self._ids(tables)}
        taken |= {block for _, cells in self.leases.values() for block in cells}
        got = self.cache.extend(np.array(slots, np.int32), np.array(totals, np.int32))
        self._apply(got)
        require(0 <= got.rows <= len(slots), "rows counts leading rows", Allocation, rows=got.rows)
        for row, (slot, total) in enumerate(zip(slots, totals, strict=True)):
            tables = self._read(slot)
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
        if self._on_demand and got.rows < len(slots):
            slot, total = slots[got.rows], totals[got.rows]
            need = sum(max(-(-total // g.size) - len(t), 0) for g, t in zip(self.groups, before[slot], strict=True))
            used = sum(len(blocks) for blocks in got.blocks)
            require(
                need > free - used,
                "a cache that takes blocks on demand refuses a row only when too few are free",
                Cache.extend,
                needed=need,
                free=free - used,
            )
        self.check()
        return got.rows

    def step(self, rows: Sequence[tuple[int, int]], drawn: Sequence[int], num_drafts: int = 0) -> None:
        """Compute ``(slot, count)`` rows; a row that has caught up draws a token. Rejected drafts leave junk behind."""
        totals = [min(self.live[s].computed + n + num_drafts, self.live[s].request.max_total) for s, n in rows]
        done = self.extend([s for s, _ in rows], totals)
        commits: list[tuple[int, int]] = []
        for (slot, count), total, token in zip(rows[:done], totals, drawn, strict=False):
            live = self.live[slot]
            start, end = live.computed, live.computed + count
            self._write(slot, start, live.names[start:end])
            if end == len(live.names):
                self._write(slot, end, [("draft", token, i) for i in range(total - end)])
            live.computed = end
            self.table.num_computed[slot] = self.table.num_committed[slot] = end
            if end == len(live.names) and end < live.request.max_total:
                self.table.tokens[slot, end] = token
                self.table.num_known[slot] += 1
                live.names.append(name(live.names[-1], token))
            commits.append((slot, end))
        if self.cache.wants_commits and commits:
            slots, counts = zip(*commits, strict=True)
            for slot, count in commits:
                self.live[slot].told = count
            self.cache.commit(np.array(slots, np.int32), np.array(counts, np.int32))
        self.check()

    def retire(self, slot: int) -> int:
        """A request ends or is preempted; its blocks stay until :meth:`settle`."""
        cells = self._needed(slot)
        lease = self.cache.retire(slot)
        self.table.release(slot)
        del self.live[slot], self.tables[slot]
        return self._hold(lease, True, cells)

    def lease(self, slot: int) -> int:
        """A transfer reads a live request's blocks."""
        cells = self._needed(slot)
        return self._hold(self.cache.lease([np.array(t, np.int32) for t in self.tables[slot]]), False, cells)

    def _hold(self, lease: int, retired: bool, cells: dict[tuple[int, int], list[Cell]]) -> int:
        require(lease not in self.leases, "a lease id is not used again before it was settled", Cache.lease, id=lease)
        self.leases[lease] = retired, cells
        self.check()
        return lease

    def settle(self, lease: int) -> None:
        """Nobody needs the lease's blocks any more."""
        self.cache.settle(lease)
        del self.leases[lease]
        self.check()

    def invalidate(self, slot: int, start: int) -> None:
        """A load failed: the blocks of ``slot`` from block ``start`` on hold junk."""
        bad = [table[start:] for table in self.tables[slot]]
        named = self.cache.invalidate([np.array(b, np.int32) for b in bad])
        valid = min(start * g.size for g in self.groups)
        for other, tokens in [(slot, valid), *named]:
            require(other in self.live, "invalidate names slots that have a table", Cache.invalidate, slot=other)
            live = self.live[other]
            live.computed, live.told = min(live.computed, tokens), min(live.told, tokens)
            self.table.num_computed[other] = self.table.num_committed[other] = live.computed
        for group, blocks in zip(self.groups, bad, strict=True):
            for block in blocks:
                self._memory.pop((group.pool, block), None)
                for _, cells in self.leases.values():
                    if (group.pool, block) in cells:
                        cells[group.pool, block] = [None] * len(
                            cells[group.pool, block]
                        )  # nobody relies on it any more
        self.check()

    def reset(self) -> bool:
        """Forget everything that is kept; memory is then filled with junk."""
        idle = not self.live and not self.leases
        done = self.cache.reset()
        require(
            done == idle,
            "reset forgets all content when no block is in use, and returns False otherwise",
            Cache.reset,
            returned=done,
            blocks_in_use=not idle,
        )
        if done:
            self._memory.clear()
        self.check()
        return done

    # ------------------------------------------------------------------ what must hold at any time

    def check(self) -> None:
        """Every live request finds what it needs, nothing that is kept has changed, blocks add up."""
        for slot, live in self.live.items():
            tables = self._read(slot)
            self._check_table(live, self.tables[slot], tables)
            self.tables[slot] = tables
            for group, table in zip(self.groups, tables, strict=True):
                first = 0 if group.window is None else max(0, live.told - group.window + 1)
                for p in range(first, live.computed):
                    cell = self._cells((group.pool, table[p // group.size]))[p % group.size]
                    require(
                        cell == live.names[p],
                        "the KV of a request's computed tokens stays in its blocks while it has a table, and what "
                        "admission finds is the KV of these very tokens and tags",
                        Cache,
                        request=live.request.request_id,
                        position=p,
                        block=table[p // group.size],
                        cell_holds=cell,
                        needed=live.names[p],
                    )
        for lease, (retired, cells) in self.leases.items():
            for (pool, block), then in cells.items():
                now = self._cells((pool, block))
                require(
                    not retired or all(t in (None, n) for n, t in zip(now, then, strict=True)),
                    "blocks of a retired table stay untouched until their lease is settled",
                    Cache.retire,
                    lease=lease,
                    block=block,
                )
        self._check_stats(self.cache.stats())
        self.cache.check_integrity()

    def _check_table(self, live: Live, old: list[list[int]], new: list[list[int]]) -> None:
        for group, before, after in zip(self.groups, old, new, strict=True):
            dead = 0 if group.window is None else max(0, live.told - group.window + 1) // group.size
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

    # ------------------------------------------------------------------ memory

    def _read(self, slot: int) -> list[list[int]]:
        tables: list[Int32] = self.cache.tables(slot)
        require(
            len(tables) == len(self.groups) and all(t.dtype == np.int32 for t in tables),
            "tables are int32 arrays, one per KV group",
            Cache.tables,
            tables=tables,
        )
        return [t.tolist() for t in tables]

    def _ids(self, tables: list[list[int]]) -> set[tuple[int, int]]:
        return {(g.pool, b) for g, table in zip(self.groups, tables, strict=True) for b in table if b}

    def _needed(self, slot: int) -> dict[tuple[int, int], list[Cell]]:
        """Per block of a table the cells of computed tokens; None for the others."""
        live = self.live[slot]
        found: dict[tuple[int, int], list[Cell]] = {}
        for group, table in zip(self.groups, self.tables[slot], strict=True):
            for index, block in enumerate(table):
                if block:
                    cells = found.setdefault((group.pool, block), [None] * len(self._cells((group.pool, block))))
                    names = live.names[index * group.size : min((index + 1) * group.size, live.computed)]
                    cells[: len(names)] = names
        return found

    def _cells(self, block: tuple[int, int]) -> list[Cell]:
        size = max(g.size for g in self.groups if g.pool == block[0])
        return self._memory.setdefault(block, [None] * size)

    def _write(self, slot: int, start: int, names: Sequence[Cell]) -> None:
        for group, table in zip(self.groups, self.tables[slot], strict=True):
            for p, cell in enumerate(names, start):
                self._cells((group.pool, table[p // group.size]))[p % group.size] = cell

    def _apply(self, got: Allocation) -> None:
        for group in self.groups:
            for block in got.zeroing[group.index] if got.zeroing else ():
                self._memory.pop((group.pool, block), None)
            for source, target in got.copies[group.index] if got.copies else ():
                self._memory[group.pool, target] = list(self._cells((group.pool, source)))


def name(before: Cell, token: int) -> Cell:
    """What the KV of ``token`` after ``before`` is."""
    return hash((before, token))


def names_of(tokens: Sequence[int], tags: dict[str, bytes]) -> list[Cell]:
    """The cell of every position of a request."""
    names: list[Cell] = []
    for token in tokens:
        names.append(name(names[-1] if names else tuple(sorted(tags.items())), token))
    return names
