"""The mechanics of making a plan: what schedulers of every policy share.

A scheduler decides; the planner does: it keeps slots, blocks, epochs, drafts and deltas consistent, and refuses
what would break them. ``begin`` → any of ``extend``, ``admit``, ``preempt`` → ``finish``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trivet.context import Hold
from trivet.plan import (
    EMPTY_I32,
    BlockDelta,
    Bool,
    InputSource,
    Int32,
    Int64,
    LogitsRows,
    MultimodalRange,
    NewRequest,
    Ragged,
    StepPlan,
    Task,
    Transfer,
)
from trivet.rows import PlanRows, Rows, block_delta, gather_tokens
from trivet.state import Request, RequestTable

if TYPE_CHECKING:
    from trivet.lifecycle import Lifecycle
    from trivet.roles import Allocation, Cache, Connector, ScheduleInputs


_NO_COPIES: Int32 = np.empty((0, 2), np.int32)
_LAST, _DEVICE = np.uint8(LogitsRows.LAST), np.uint8(InputSource.DEVICE)  # their opposites are 0


@dataclass(frozen=True, slots=True)
class Admission:
    """What came of an attempt to admit. ``num_tokens`` are scheduled in this plan; 0 with ``ok``: admitted, but
    held, or none were asked for."""

    ok: bool
    num_tokens: int = 0
    #: why not: ``hold``, ``turn`` (no slot), ``memory`` (no blocks), ``compute`` (no token budget)
    reason: str = ""


class Planner:
    """Builds one :class:`StepPlan` at a time. Belongs to the engine's thread."""

    def __init__(
        self,
        table: RequestTable,
        cache: Cache,
        lifecycle: Lifecycle,
        *,
        connector: Connector | None = None,
        num_groups: int,
        token_feedback: bool,
        max_in_flight: int,
        draft_lookahead: int = 0,
    ) -> None:
        self.table, self.cache, self._life, self._connector = table, cache, lifecycle, connector
        self._groups, self._feedback, self._depth, self._lookahead = (
            num_groups,
            token_feedback,
            max_in_flight,
            draft_lookahead,
        )
        self._step = 0
        #: request id → reason, as wrappers of ``trivet_schedule`` asked for in the last step
        self.step_holds: dict[str, str] = {}
        self._clear()

    def _clear(self) -> None:
        self._inputs: ScheduleInputs | None = None
        self._rows = PlanRows()
        self._new: dict[int, Request] = {}
        self._parents: dict[int, int] = {}
        self._planned = np.zeros(self.table.max_num_seqs, np.bool_)
        self._held_now = np.zeros(self.table.max_num_seqs, np.bool_)
        self._block_slots: list[list[int]] = [[] for _ in range(self._groups)]
        self._blocks: list[list[int]] = [[] for _ in range(self._groups)]
        self._copies: list[list[tuple[int, int]]] = [[] for _ in range(self._groups)]
        self._zeroing: list[list[int]] = [[] for _ in range(self._groups)]
        self.num_preempted = 0

    # ------------------------------------------------------------------ what a scheduler may look at

    @property
    def step_id(self) -> int:
        """The number of the plan being made, or of the last one."""
        return self._step

    @property
    def tokens_left(self) -> int:
        """What remains of the step's token budget."""
        assert self._inputs is not None
        return self._inputs.token_budget - self._rows.num_tokens

    @property
    def memory_pending(self) -> bool:
        """Whether blocks come free by themselves once the steps in flight have been committed."""
        return self._life.has_retired

    def pending(self, slots: Int32) -> Int32:
        """``[n]`` tokens that each slot still has to compute, drafts included."""
        return self._pending()[slots.astype(np.intp)]

    def _pending(self) -> Int32:
        t = self.table
        return t.num_known + t.num_placeholders + t.num_drafts - t.num_computed

    def runnable(self) -> Int32:
        """Slots that may be given tokens in this plan, in admission order."""
        # Whole columns first: one gather at the end costs less than one per column.
        t = self.table
        ok = ~(t.held | self._planned | self._held_now)
        if self._feedback:
            drawn = t.num_placeholders
            idle = drawn == 0
            ok &= (t.in_flight < self._depth) & (idle | ~t.serial)
            ok &= idle | (t.num_known + drawn < t.max_total)
        else:
            ok &= t.in_flight == 0
        ok &= self._pending() > 0
        return t.order[ok[t.order.astype(np.intp)]]

    def planned(self, slots: Int32) -> Bool:
        """``[n]`` whether each slot is in this plan already."""
        return self._planned[slots.astype(np.intp)]

    def is_held(self, request: Request) -> bool:
        """Whether a request may not be scheduled in this step."""
        return bool(request.holds) or (self._inputs is not None and request.request_id in self._inputs.holds)

    # ------------------------------------------------------------------ making a plan

    def begin(self, inputs: ScheduleInputs) -> None:
        """Start the plan of a step."""
        if self._inputs is not None:
            self._clear()
        inputs.token_budget, inputs.max_num_seqs = max(int(inputs.token_budget), 0), int(inputs.max_num_seqs)
        self._inputs = inputs
        self._step = inputs.step_id
        self.step_holds = dict(inputs.holds)
        for request_id in inputs.holds:
            request = self._life.requests.get(request_id)
            if request is not None and request.slot >= 0:
                self._held_now[request.slot] = True

    def extend(self, slots: Int32, counts: Int32) -> int:
        """Schedule ``counts[i]`` ≥ 1 tokens for running slot ``slots[i]``, in order, as far as memory goes.

        Returns how many leading rows are in the plan; the first row beyond lacks blocks. Counts beyond what a row
        has pending, or beyond the token budget, are an error of the scheduler's.
        """
        if not len(slots):
            return 0
        t, at = self.table, slots.astype(np.intp)
        if np.count_nonzero((counts < 1) | (counts > self._pending()[at])):
            raise ValueError("a row must be given between 1 and its pending number of tokens")
        total = int(np.add.reduce(counts))
        if total > self.tokens_left:
            raise ValueError(f"{total} tokens exceed the {self.tokens_left} left in the step's token budget")
        if np.count_nonzero(self._planned[at]):
            raise ValueError("a slot can be in a plan only once")
        totals = t.num_computed[at] + counts
        if self._lookahead:
            # Proposals end where the output does, so a request never needs more than its greatest length.
            totals = np.maximum(totals, np.minimum(totals + self._lookahead, t.max_total[at]))
        got = self.cache.extend(slots, totals)
        self._note(got, appended=True)
        if got.rows:
            self._take(at[: got.rows], counts[: got.rows])
        return got.rows

    def admit(self, request: Request, max_tokens: int, *, reserve: int = 0) -> Admission:
        """Give a queued request a slot and up to ``max_tokens`` of its tokens in this plan.

        Blocks for all of its known tokens are taken at once, and for ``reserve`` more, so that a prompt once begun
        is not thrown back half-way. With ``max_tokens`` 0 it gets slot and blocks, and tokens by a later
        ``extend``. On success the scheduler must drop the request from its queue."""
        assert self._inputs is not None
        t = self.table
        if self.is_held(request):
            return Admission(False, reason="hold")
        if t.num_running >= min(self._inputs.max_num_seqs, t.max_num_seqs):
            return Admission(False, reason="turn")
        budget = min(max_tokens, self.tokens_left)
        if budget < min(max_tokens, 1):
            return Admission(False, reason="compute")
        slot = self._life.assign(request)
        if not self._allocate(request, slot, budget, reserve):
            self._life.unassign(slot)
            return Admission(False, reason="hold" if request.holds else "memory")
        self._new[slot] = request
        self._life.admitted(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
        if request.holds or not budget:
            t.held[slot] = bool(request.holds)
            return Admission(True)
        slots = np.array([slot])
        count = np.minimum(self._pending()[slots], budget).astype(np.int32)
        self._take(slots, count)
        return Admission(True, int(count[0]))

    def preempt(self, slot: int) -> Request:
        """Take a running request's slot and blocks away and queue it again; its tokens are computed anew later."""
        if self._planned[slot]:
            raise ValueError(f"slot {slot} is in this plan already, its blocks are spoken for")
        self._new.pop(slot, None)
        self._parents.pop(slot, None)
        request = self._life.preempt(slot)
        self._held_now[slot] = False  # whoever gets the slot in this plan is not held with it
        self.num_preempted += 1
        return request

    def finish(self) -> StepPlan:
        """The plan; empty of rows when nothing could be scheduled."""
        t = self.table
        rows = self._rows.concatenate()
        life = self._life
        preempted, preempted_epochs = life.take_preempted()
        finished, finished_epochs = life.take_finished()
        for store in self.cache.take_stores():
            life.start_store(store)
        loads, stores = life.take_transfers()
        at = rows.slots.astype(np.intp)
        # A new request travels whole, so its tokens must not be sent again as a delta.
        new = [self._new_request(slot, request) for slot, request in self._new.items()]
        for slot in self._new:
            t.num_sent[slot] = t.num_known[slot]
        known = t.num_known[at]
        tokens = gather_tokens(t.tokens, at, t.num_sent[at], known)
        t.num_sent[at] = known
        draft_ids, draft_parents = self._used_drafts(rows)
        adapter = t.adapter[at]
        new_blocks, copies, zeroing = self._block_deltas()
        # All fields at once: a default that is replaced costs as much as one that stays.
        plan = StepPlan(
            self._step,
            new=new,
            resumed=np.array([n.slot for n in new if n.resumed], np.int32) if new else EMPTY_I32,
            preempted=preempted,
            preempted_epochs=preempted_epochs,
            finished=finished,
            finished_epochs=finished_epochs,
            slots=rows.slots,
            epochs=t.epoch[at],
            num_computed=rows.computed,
            num_scheduled=rows.scheduled,
            num_drafts=rows.drafts,
            draft_ids=draft_ids,
            draft_parents=draft_parents,
            lookahead=self._ahead(at, rows),
            new_blocks=new_blocks,
            copies=copies,
            zeroing=zeroing,
            loads=loads,
            stores=stores,
            logits_rows=rows.logits,
            samples=rows.samples,
            pools=rows.pools,
            input_source=rows.source,
            tokens=tokens,
            draft_k=self._wanted_drafts(at, rows.samples),
            adapter=adapter,
            # A copy: the indices of adapters that no slot uses are given to others.
            adapters=life.adapters.copy() if life.adapters and bool((adapter >= 0).any()) else [],
            multimodal=self._ranges(at, rows.computed, rows.scheduled),
        )
        self._clear()
        return plan

    # ------------------------------------------------------------------ parts

    def _allocate(self, request: Request, slot: int, budget: int, reserve: int) -> bool:
        """Blocks for all known tokens and ``reserve`` more; False when memory is short or the cache holds the request
        (the slot has a table all the same)."""
        t = self.table
        known = int(t.num_known[slot])
        fork = self._fork_source(request)
        loads: list[Transfer] = []
        shared = int(t.num_prompt[slot]) - 1
        forked = self.cache.fork(fork, slot, shared) if fork >= 0 else None
        if forked is None:
            hit = self.cache.admit(slot, request)
            if request.holds:
                return False
            fork, shared, loads = -1, hit.num_tokens, hit.loads
        t.num_computed[slot] = t.num_committed[slot] = shared
        # A prompt whose logprobs are wanted is never found; whatever else is loaded comes on top of the hit.
        chunk = min(known, shared + budget)
        connector = self._connector if fork < 0 and not t.whole_prompt[slot] else None
        first = known if connector is not None else chunk
        got = self._room(slot, first, known, reserve)
        if got.rows < 1 and first > chunk and t.num_running == 1:
            # Nobody will make more room. Groups with a window may hold it chunk by chunk, if nothing is loaded.
            connector, got = None, self._room(slot, chunk, known, reserve)
        if got.rows < 1:
            return False
        # Only now is it certain that the request gets in, and whatever its blocks need may enter the plan.
        if forked is not None:
            self._note(forked)
            self._parents[slot] = fork
        self._note(got)
        # The logits of a prompt position that is loaded are never computed.
        for load in loads:
            self._life.start_load(request, load, external=False)
        if connector is not None:
            external = connector.match(request, shared)
            count = min(external.num_tokens, known - 1 - shared) if external is not None else 0
            if external is not None and count > 0:
                load = self._life.external_load(slot, request, shared, count, external)
                self._life.start_load(request, load, external=True)
                t.num_computed[slot] += count
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = int(t.num_computed[slot])
        request.num_recomputed_tokens += max(request.num_lost_tokens - int(t.num_computed[slot]), 0)
        request.num_lost_tokens = 0
        if getattr(request.params, "structured_outputs", None) is not None:
            hold = Hold("grammar", "core", "its grammar is being compiled", time.monotonic())
            request.holds[hold.plugin, hold.kind] = hold
        return True

    def _room(self, slot: int, first: int, known: int, reserve: int) -> Allocation:
        """Blocks for ``first`` tokens of a slot, if there are as many as ``known`` and ``reserve`` more need."""
        most = int(self.table.max_total[slot])
        total = max(min(first + self._lookahead, most), first)
        reserved = max(min(known + max(reserve, self._lookahead), most), known)
        return self.cache.extend(*(np.array([n], np.int32) for n in (slot, total, reserved)))

    def _note(self, got: Allocation, *, appended: bool = False) -> None:
        """Copies and zeroing travel with the plan; appended blocks do only for slots that the workers know already."""
        for g in range(self._groups):
            if appended and got.slots[g]:
                slots, blocks = got.slots[g], got.blocks[g]
                if self._new:
                    known = [i for i, slot in enumerate(slots) if slot not in self._new]
                    slots, blocks = [slots[i] for i in known], [blocks[i] for i in known]
                self._block_slots[g] += slots
                self._blocks[g] += blocks
            if got.copies:
                self._copies[g] += got.copies[g]
            if got.zeroing:
                self._zeroing[g] += got.zeroing[g]

    def _fork_source(self, request: Request) -> int:
        parent = self._life.parent(request)
        if parent is None or parent.slot < 0 or parent.slot in self._new or request.output_ids:
            return -1
        # A shared prompt's logits are the parent's, and what is still being loaded may fail.
        if getattr(request.params, "prompt_logprobs", None) is not None or self.table.held[parent.slot]:
            return -1
        ready = self.table.num_committed[parent.slot] >= request.num_prompt
        return parent.slot if ready else -1

    def _take(self, slots: Int64, counts: Int32) -> None:
        # What few requests have is looked for in whole columns, which costs less than a gather of the rows.
        t = self.table
        drawn, drafts = t.num_placeholders[slots], t.num_drafts[slots]
        before = t.num_computed[slots]
        after = before + counts
        base = t.num_known[slots] + drawn
        samples = after >= base
        source = np.zeros(len(slots), np.uint8)
        if self._feedback:
            source = ((drawn > 0) & samples) * _DEVICE
        pools = np.zeros(len(slots), np.bool_)
        if np.count_nonzero(t.pooled):
            pools = samples & t.pooled[slots]
            samples = samples & ~pools
        logits = samples * _LAST
        used = drafts
        if np.count_nonzero(drafts):
            used = np.minimum(np.maximum(after - base, 0), drafts)
            t.num_drafts[slots] = used
            logits[samples & (used > 0)] = LogitsRows.DRAFTS
        if np.count_nonzero(t.prompt_logprobs):
            # The logits at position p are about token p + 1: the prompt's last position only matters if it samples.
            logits[t.prompt_logprobs[slots] & (before < t.num_prompt[slots] - 1)] = LogitsRows.PROMPT
        t.num_computed[slots] = after
        t.num_placeholders[slots] = drawn + samples
        t.in_flight[slots] += 1
        self._planned[slots] = True
        self._rows.add(slots, before, counts, used, samples, pools, source, logits)

    def _ahead(self, slots: Int64, rows: Rows) -> Int32:
        if not self._lookahead:
            return np.zeros(len(slots), np.int32)
        left = self.table.max_total[slots] - rows.computed - rows.scheduled
        ahead: Int32 = np.minimum(np.maximum(left, 0), self._lookahead)
        return ahead

    def _wanted_drafts(self, slots: Int64, samples: Bool) -> Int32:
        t = self.table
        wanted = t.draft_k[slots]
        if not np.count_nonzero(wanted):
            return wanted
        # One token is drawn in any case, and a draft beyond the last possible token is work for nothing.
        room = t.max_total[slots] - t.num_known[slots] - t.num_placeholders[slots] - 1
        few: Int32 = np.minimum(wanted, np.maximum(room, 0)) * samples
        return few

    def _used_drafts(self, rows: Rows) -> tuple[Ragged | None, Ragged | None]:
        """The ids of the drafts that the rows verify, and their parents unless all are chains."""
        t = self.table
        if not np.count_nonzero(rows.drafts):
            return None, None
        ids: list[Int32] = []
        parents: list[Int32] = []
        tree = False
        for slot, used in zip(rows.slots.tolist(), rows.drafts.tolist(), strict=True):
            draft_ids, draft_parents = t.drafts.pop(slot, (EMPTY_I32, None)) if used else (EMPTY_I32, None)
            ids.append(draft_ids[:used])
            tree |= draft_parents is not None
            chain = np.arange(-1, used - 1, dtype=np.int32)
            parents.append(chain if draft_parents is None else draft_parents[:used])
        return Ragged.from_rows(ids), Ragged.from_rows(parents) if tree else None

    def _ranges(self, slots: Int64, computed: Int32, scheduled: Int32) -> list[MultimodalRange]:
        """What of the requests' ranges lies in this step's tokens."""
        t = self.table
        found: list[MultimodalRange] = []
        if not np.count_nonzero(t.ranged):
            return found
        for row in np.flatnonzero(t.ranged[slots]).tolist():
            slot, begin = int(slots[row]), int(computed[row])
            request = t.requests[slot]
            assert request is not None
            for one in request.ranges:
                first, last = max(one.start, begin), min(one.start + one.length, begin + int(scheduled[row]))
                if first < last:
                    offset = one.offset + first - one.start
                    found.append(MultimodalRange(slot, one.item, first, last - first, offset))
        return found

    def _new_request(self, slot: int, request: Request) -> NewRequest:
        t = self.table
        return NewRequest(
            request_id=request.request_id,
            slot=slot,
            epoch=request.epoch,
            token_ids=t.tokens[slot, : t.num_known[slot]].copy(),
            num_prompt=request.num_prompt,
            num_computed=int(t.num_committed[slot]),
            blocks=self.cache.tables(slot),
            params=request.params,
            task=Task(request.task),
            seed=request.seed,
            stop_ids=t.all_stop_ids(slot),
            bad_words=request.bad_words,
            adapter=request.adapter,
            parent_slot=self._parents.get(slot, -1),
            resumed=request.num_preemptions > 0,
            extra=request.extra,
        )

    def _block_deltas(self) -> tuple[list[BlockDelta], list[Int32], list[Int32]]:
        deltas = [block_delta(s, b) for s, b in zip(self._block_slots, self._blocks, strict=True)]
        copies = [np.array(c, np.int32).reshape(-1, 2) if c else _NO_COPIES for c in self._copies]
        zeroing = [np.array(z, np.int32) if z else EMPTY_I32 for z in self._zeroing]
        return deltas, copies, zeroing
