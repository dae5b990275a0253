"""A naive model of a cache's callers: every cell of memory holds a name of all the tokens before it.

Whatever a cache provider does wrong with ids (a block given away twice, a wrong hit, a copy left out) makes a cell hold
another name than a request needs there. One operation of the model is one plan of the engine's; a step may stay in
flight over others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trivet.context import Hold
from trivet.roles import Allocation, Cache, KVLayout
from trivet.state import PromptRange, Request, RequestTable
from trivet.testing.suites._base import require
from trivet.testing.suites._cache_checks import CacheChecks
from trivet.testing.suites._cache_memory import Block
from trivet.testing.suites._cache_names import Cell, Live
from trivet.testing.suites._cache_tier import NaiveTier
from trivet_schemas.sampling import SamplingParams


@dataclass(slots=True)
class _Row:
    """What a step in flight computes for one request, and where it writes that."""

    slot: int
    epoch: int
    end: int
    token: int
    writes: list[tuple[Block, int, Cell]]


class CacheModel(CacheChecks):
    """Calls a cache as the engine does and checks its contract after every call."""

    def __init__(
        self,
        cache: Cache,
        layout: KVLayout,
        table: RequestTable,
        context: Any = None,
        *,
        on_demand: bool,
        tiers: Sequence[NaiveTier] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(cache, layout, table, on_demand=on_demand, tiers=tiers, seed=seed)
        if context is not None:
            context.on_hold, context.on_release = self._hold_request, self._release_request
        self._requests: dict[str, Request] = {}
        self._flying: list[_Row] = []
        self._late: list[int] = []  # leases of tables that the step in flight writes to
        self.preempted: list[Request] = []

    # ------------------------------------------------------------------ requests come

    def admit(
        self,
        prompt: Sequence[int],
        tags: dict[str, bytes],
        max_total: int,
        parent: int | None = None,
        *,
        chunk: int | None = None,
        reserve: int = 0,
        ranges: tuple[PromptRange, ...] = (),
        prompt_logprobs: bool = False,
        flush: bool = True,
    ) -> bool:
        """A request comes, and gets a slot and blocks for its prompt; False when memory is short or it is held.

        Args:
            prompt: Token ids.
            tags: Context of its prefix.
            max_total: Prompt and outputs at most.
            parent: The slot that it is forked from.
            chunk: Tokens beyond those found that are computed at once; None: all. The rest is reserved.
            reserve: Tokens beyond the known ones for which there must be blocks.
            ranges: Positions that take embeddings.
            prompt_logprobs: Whether all of the prompt must be computed.
            flush: Whether the plan ends with this; else more admissions follow in it.
        """
        self._count += 1
        params = SamplingParams(prompt_logprobs=0 if prompt_logprobs else None)
        request = Request(f"r{self._count}", np.array(prompt, np.int32), params, max_total, 0, index=self._count)
        request.cache_tags, request.ranges = tags, ranges
        return self.enter(request, parent, chunk=chunk, reserve=reserve, flush=flush)

    def enter(
        self,
        request: Request,
        parent: int | None = None,
        *,
        chunk: int | None = None,
        reserve: int = 0,
        flush: bool = True,
    ) -> bool:
        """A new or preempted request gets a slot and blocks, see :meth:`admit`."""
        self._requests = {r.request_id: r for r in self.table.requests if r is not None}
        self._requests[request.request_id] = request
        self.sync()
        known = request.num_known
        slot = self.table.assign(request, (), 0)
        tokens = self.table.tokens[slot, :known].tolist()
        live = Live(request, self.memory.namer.names(tokens, request.cache_tags, request.ranges))
        got = None if parent is None else self._fork(parent, slot, live)
        loads = []
        if got is None:
            hit = self._look_up(slot, live)
            if hit is None:
                return self._give_up(slot)
            found, loads = hit.num_tokens, hit.loads
        else:
            found = known - 1
        live.computed = live.told = found
        self.table.num_computed[slot] = self.table.num_committed[slot] = found
        self.live[slot] = live
        self.tables[slot] = self.read(slot)
        total = known if chunk is None else min(known, found + chunk)
        most = max(min(known + reserve, request.max_total), known)
        if not self.extend([slot], [total], [most]):
            del self.live[slot], self.tables[slot]
            return self._give_up(slot)
        if got is not None:
            self.note(got, slot)
        self.start_loads(slot, live, loads)
        self._open = True
        if flush:
            self.flush()
        self.check()
        return True

    def close(self) -> None:
        """What follows is not in the plan of the admissions before."""
        if self._open:
            self.flush()

    def _give_up(self, slot: int) -> bool:
        self.cache.settle(self.cache.retire(slot))
        self.table.unassign(slot)
        self.flush()
        return False

    def _fork(self, parent: int, slot: int, live: Live) -> Allocation | None:
        shared = live.request.num_prompt - 1
        free = self.cache.stats().free
        got = self.cache.fork(parent, slot, shared)
        theirs_by_group = self.tables[parent]
        if got is None:
            short = free < sum(shared % g.size > 0 for g in self.groups)
            moved = any(
                not all(table[g.first(shared) // g.size : -(-shared // g.size)])
                for g, table in zip(self.groups, theirs_by_group, strict=True)
            )
            require(
                short or moved or not self.on_demand,
                "a fork fails only when memory is short or the parent's window has moved on",
                Cache.fork,
                free=free,
                parent=theirs_by_group,
                tokens=shared,
            )
            require(
                not any(len(t) for t in self.read(slot)), "a fork that fails leaves no table", Cache.fork, slot=slot
            )
            return None
        for group, own, theirs in zip(self.groups, self.read(slot), theirs_by_group, strict=True):
            full, partly = divmod(shared, group.size)
            first = group.first(shared) // group.size
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
        return got

    # ------------------------------------------------------------------ holds

    def _hold_request(self, request_id: str, hold: Hold) -> None:
        self._requests[request_id].holds[hold.plugin, hold.kind] = hold
        self.held[request_id] = hold

    def _release_request(self, request_id: str, plugin: str, kind: str) -> None:
        hold = self.held.get(request_id)
        if hold is not None and (hold.plugin, hold.kind) == (plugin, kind):
            del self.held[request_id]
        request = self._requests.get(request_id)
        if request is not None:
            request.holds.pop((plugin, kind), None)

    # ------------------------------------------------------------------ steps

    def step(self, rows: Sequence[tuple[int, int]], drawn: Sequence[int], num_drafts: int = 0) -> None:
        """Compute ``(slot, count)`` rows; a row that has caught up draws a token. Rejected drafts leave junk behind."""
        self.submit(rows, drawn, num_drafts)
        self.commit()

    def submit(self, rows: Sequence[tuple[int, int]], drawn: Sequence[int], num_drafts: int = 0) -> None:
        """The same, but the step stays in flight until :meth:`commit`."""
        self.close()
        self.commit()
        totals = [min(self.live[s].computed + n + num_drafts, self.live[s].request.max_total) for s, n in rows]
        done = self.extend([s for s, _ in rows], totals)
        for (slot, count), total, token in zip(rows[:done], totals, drawn, strict=False):
            live = self.live[slot]
            start, end = live.computed, live.computed + count
            content: list[Cell] = list(live.names[start:end])
            draws = end == len(live.names)
            writes: list[tuple[Block, int, Cell]] = []
            for group, table in zip(self.groups, self.tables[slot], strict=True):
                cells: list[Cell] = [(group.index, name) for name in content]
                if draws:
                    cells += [("draft", token, i) for i in range(total - end)]
                for p, cell in enumerate(cells, start):
                    writes.append(((group.pool, table[p // group.size]), p % group.size, cell))
            self._flying.append(_Row(slot, int(self.table.epoch[slot]), end, token if draws else -1, writes))
            self.table.num_computed[slot] = end
            self.table.in_flight[slot] += 1
        self.flush()
        self.check()

    def commit(self) -> None:
        """The step in flight ends, if there is one."""
        self.close()
        rows, self._flying = self._flying, []
        if not rows:
            return
        for row in rows:
            for block, offset, cell in row.writes:
                self.memory.write(block, offset, cell, row.slot if self.is_live(row.slot, row.epoch) else -1)
        rows = [row for row in rows if self.is_live(row.slot, row.epoch)]
        for row in rows:
            live, slot = self.live[row.slot], row.slot
            live.computed = row.end
            self.table.in_flight[slot] -= 1
            self.table.num_committed[slot] = row.end
            if row.token >= 0 and row.end < live.request.max_total:
                self.table.tokens[slot, row.end] = row.token
                self.table.num_known[slot] += 1
                live.names.append(self.memory.namer.name(live.names[-1], row.token))
        if self.cache.wants_commits and rows:
            for row in rows:
                self.live[row.slot].told = row.end
            self.cache.commit(
                np.array([row.slot for row in rows], np.int32), np.array([row.end for row in rows], np.int32)
            )
        late, self._late = self._late, []
        for lease in late:
            self.settle(lease)
        self.sync()
        self.check()

    # ------------------------------------------------------------------ requests go

    def retire(self, slot: int) -> int:
        """A request ends or is preempted; its blocks stay until :meth:`settle`."""
        self.close()
        cells = self.needed(slot)
        lease = self.cache.retire(slot)
        self.table.release(slot)
        if any(row.slot == slot for row in self._flying):
            self._late.append(lease)
        del self.live[slot], self.tables[slot]
        return self.keep(lease, True, cells)

    def preempt(self, slot: int) -> None:
        """A request loses its slot and comes back later."""
        request = self.live[slot].request
        lease = self.retire(slot)
        request.num_preemptions += 1
        request.holds.clear()
        self.preempted.append(request)
        if lease not in self._late:
            self.settle(lease)

    def lease(self, slot: int) -> int:
        """A transfer reads a live request's blocks."""
        self.close()
        return self.keep(self.cache.lease([np.array(t, np.int32) for t in self.tables[slot]]), False, self.needed(slot))

    def settle(self, lease: int) -> None:
        """Nobody needs the lease's blocks any more; a step in flight that writes to them ends first."""
        self.close()
        if lease in self._late:
            self.commit()
            return
        self.cache.settle(lease)
        del self.leases[lease]
        self.check()

    def invalidate(self, slot: int, start: int) -> None:
        """A load from elsewhere failed: what ``slot`` has from token ``start`` on, a multiple of every block size, is
        junk."""
        self.close()
        bad = [table[start // g.size :] for g, table in zip(self.groups, self.tables[slot], strict=True)]
        self.lose(bad, slot)
        live = self.live.get(slot)
        if live is not None:
            self.rewind(slot, start)
        self.damaged.clear()
        self.check()

    def reset(self) -> bool:
        """Forget everything that is kept; memory is then filled with junk."""
        self.close()
        idle = not self.live and not self.leases and not self.stores
        done = self.cache.reset()
        require(
            done == idle,
            "reset forgets all content when no block is in use, and returns False otherwise",
            Cache.reset,
            returned=done,
            blocks_in_use=not idle,
        )
        if done:
            self.sync()
            require(
                not self.memory.findable, "nothing can be found after a reset", Cache.reset, found=self.memory.findable
            )
            self.memory.forget()
        self.check()
        return done
