"""The third leg: take a step's result over into the request state.

Works on columns for all rows of the plan at once; loops run only over what is rare: ends, logprobs, drafts, errors,
transfers. A row whose epoch is no longer its slot's (preempted, aborted, ended in the meantime) is dropped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trivet.events import CommitEvents
from trivet.plan import EMPTY_I32, Bool, Int32, Int64, Ragged, StepPlan
from trivet.result import ConstraintState, StepResult, TokenLogprobs
from trivet.rows import spans

if TYPE_CHECKING:
    from trivet.lifecycle import Lifecycle
    from trivet.roles import Cache
    from trivet.state import Request, RequestTable

_NEVER = np.int32(2**31 - 1)


@dataclass(frozen=True, slots=True)
class _End:
    """A row whose output ends: with a stop token, or (None) at its greatest length. ``whole``: nothing was cut off."""

    request: Request
    token: int | None
    whole: bool


class Committer:
    """Implements the ``trivet_commit`` phase. Belongs to the engine's thread."""

    def __init__(self, table: RequestTable, cache: Cache, lifecycle: Lifecycle, eos_token_ids: frozenset[int]) -> None:
        self._table, self._cache, self._life, self._eos = table, cache, lifecycle, eos_token_ids

    def commit(self, plan: StepPlan, result: StepResult) -> CommitEvents:
        """Apply ``result``; every request named in ``plan`` that is still there advances, ends, or is put back."""
        if result.step_id != plan.step_id:
            raise ValueError(f"the result of step {result.step_id} arrived for step {plan.step_id}")
        table, life = self._table, self._life
        events = CommitEvents(plan.step_id)
        at = plan.slots.astype(np.intp)
        live: Bool = table.epoch[at] == plan.epochs
        going = at[live]
        table.in_flight[going] -= 1
        table.num_placeholders[going] -= plan.samples[live]
        rewound = life.end_transfers(result.transfers_finished, result.transfers_failed, result.invalid_blocks)
        if rewound:
            void = live & np.isin(plan.slots, list(rewound))
            table.num_drafts[plan.slots[void & (plan.num_drafts > 0)]] = 0
            live &= ~void
            self._restart([s for s in rewound if table.in_flight[s] > 0])
        self._fail(result)
        live &= table.epoch[at] == plan.epochs
        if result.undone:
            self._undo(plan, live)
        else:
            self._advance(plan, result, at, live, events)
        self._constraints(result)
        if not result.undone:
            self._require_progress(plan, result, live)
        life.release_children()
        life.settle(plan.step_id)
        return events

    def abandon(self, plan: StepPlan, message: str, report: StepResult | None = None, *, sent: bool = True) -> None:
        """The step failed as a whole: its requests end with ``message``, nothing it wrote is ever used.

        ``report`` is the step's result if it reached the workers all the same: what it says of transfers, grammars and
        other requests counts. Without ``sent`` the workers never saw the plan, and nothing waits for its end."""
        table, life = self._table, self._life
        live = table.epoch[plan.slots] == plan.epochs
        table.in_flight[plan.slots[live]] -= 1
        for key in plan.new:
            # Those without a row too: whatever the workers were to begin for them may not have begun.
            if life.live(key) and sent:
                self._abort(key.slot, message)
        for slot, epoch in zip(plan.slots[live].tolist(), plan.epochs[live].tolist(), strict=True):
            if table.epoch[slot] == epoch:
                self._abort(slot, message)
        if report is not None:
            rewound = life.end_transfers(report.transfers_finished, report.transfers_failed, report.invalid_blocks)
            self._restart([s for s in rewound if table.in_flight[s] > 0])
            self._fail(report)
            self._constraints(report)
        life.release_children()
        if sent:
            life.settle(plan.step_id)

    # ------------------------------------------------------------------ parts

    def _advance(self, plan: StepPlan, result: StepResult, slots: Int64, live: Bool, events: CommitEvents) -> None:
        table = self._table
        offsets, flat = result.accepted.offsets, result.accepted.values
        if len(offsets) != len(slots) + 1:
            raise ValueError(f"the result has {len(offsets) - 1} rows of accepted tokens, the plan has {len(slots)}")
        counts = result.accepted.lengths
        done = plan.num_computed + plan.num_scheduled
        going = slots[live]
        if np.count_nonzero(plan.num_drafts):
            # Verified rows computed the KV of all drafts; that of the rejected ones is written over later.
            verified = plan.num_drafts > 0
            rejected = np.where(verified, np.maximum(plan.num_drafts - np.maximum(counts - 1, 0), 0), 0)
            table.num_computed[going] -= rejected[live]
            table.num_drafts[slots[live & verified]] = 0
            done -= rejected
        committed = np.maximum(table.num_committed[going], done[live])
        table.num_committed[going] = committed
        if result.forced is not None:
            counts, flat = _joined(result.accepted, result.forced)
            offsets = np.zeros(len(counts) + 1, np.int32)
            np.cumsum(counts, out=offsets[1:])
        kept, ends = self._append(slots, counts * live, offsets, flat, events)
        if self._cache.wants_commits and len(going):
            # Before anything ends: what a request computed in its last step is as good as the rest.
            self._cache.commit(plan.slots[live], np.minimum(committed, table.num_known[going]))
        self._outputs(result, kept, events)
        if ends:
            self._end(ends, result)
        if result.next_drafts is not None:
            self._keep_drafts(plan, result, live & (table.epoch[slots] == plan.epochs))

    def _append(
        self, slots: Int64, counts: Int32, offsets: Int32, flat: Int32, events: CommitEvents
    ) -> tuple[Int32, list[_End]]:
        """Append tokens up to each row's stop; returns how many of each row were kept, and the rows that stop."""
        table = self._table
        rows = counts.nonzero()[0]
        kept = np.zeros(len(slots), np.int32)
        if not len(rows):
            events.tokens = Ragged.empty()
            return kept, []
        sub, many = slots[rows], counts[rows]
        starts, index = spans(offsets[rows], many)
        tokens = flat[index.astype(np.intp)]
        several = len(tokens) > len(rows)
        known = table.num_known[sub]
        owner, position, nth = sub, known, EMPTY_I32
        if several:
            nth = np.arange(len(tokens), dtype=np.int32) - np.repeat(starts[:-1], many)
            owner, position = np.repeat(sub, many), np.repeat(known, many) + nth
        last = position >= table.max_total[owner] - 1
        stops = table.stops(owner, tokens)
        if np.count_nonzero(stops):
            stops &= position >= table.min_total[owner]
            last |= stops
        ending = last.nonzero()[0]
        if several and len(ending):
            # Tokens behind a row's first end are cut off.
            first = np.minimum.reduceat(np.where(last, nth, _NEVER), starts[:-1])
            length = np.minimum(many, np.where(first == _NEVER, _NEVER, first + 1)).astype(np.int32)
            keep = nth < np.repeat(length, many)
            ending = ending[keep[ending]]
            owner, position, kept_tokens = owner[keep], position[keep], tokens[keep]
        else:
            length, kept_tokens = many, tokens
        table.tokens[owner, position.astype(np.intp)] = kept_tokens
        known = known + length
        table.num_known[sub] = known
        kept[rows] = length
        out = starts
        if length is not many:
            out = np.zeros(len(rows) + 1, np.int32)
            np.cumsum(length, out=out[1:])
        events.tokens = Ragged(out, kept_tokens)
        requests = table.requests
        events.requests = [requests[s] for s in sub.tolist()]
        self._first_tokens(known - table.num_prompt[sub], events)
        ends: list[_End] = []
        for at in ending.tolist():
            i = int(np.searchsorted(starts, at, side="right")) - 1
            token = int(tokens[at]) if stops[at] else None
            ends.append(_End(events.requests[i], token, whole=bool(length[i] == many[i])))
        return kept, ends

    def _require_progress(self, plan: StepPlan, result: StepResult, live: Bool) -> None:
        """A row that was to draw or to pool and did not would wait for ever: its request ends."""
        missing = result.accepted.lengths == 0
        if not np.count_nonzero(missing):
            return
        idle = live & (plan.samples | plan.pools) & missing
        idle &= self._table.epoch[plan.slots] == plan.epochs
        for row in np.flatnonzero(idle).tolist():
            self._abort(int(plan.slots[row]), "the worker returned neither a token nor a pooled output for it")

    def _abort(self, slot: int, message: str) -> None:
        request = self._table.requests[slot]
        assert request is not None
        self._life.finish(request, "error", message=message)

    def _first_tokens(self, num_output: Int32, events: CommitEvents) -> None:
        fresh = (num_output <= 1).nonzero()[0]
        if len(fresh):
            now = time.monotonic()
            for i in fresh.tolist():
                request = events.requests[i]
                if request.first_token_time is None:
                    request.first_token_time = now
                    self._life.history.first_token(request, events.step_id)

    def _end(self, ends: list[_End], result: StepResult) -> None:
        complete = {(c.slot, c.epoch) for c in result.constraints if c.state == ConstraintState.TERMINATED}
        for end in ends:
            request = end.request
            if end.token is not None:
                # As in vLLM: the model's own end has no stop_reason, a stop token of the user's is named.
                own = end.token in self._eos and not getattr(request.params, "ignore_eos", False)
                self._life.finish(request, "stop", stop_reason=None if own else end.token)
            elif end.whole and (request.slot, request.epoch) in complete:
                # The last allowed token completed the structured output.
                self._life.finish(request, "stop")
            else:
                self._life.finish(request, "length")

    def _outputs(self, result: StepResult, kept: Int32, events: CommitEvents) -> None:
        table = self._table
        if result.logprobs:
            place = {row: i for i, row in enumerate(np.flatnonzero(kept).tolist())}
            for entry in result.logprobs:
                if entry.row in place:
                    events.logprobs.append((place[entry.row], _cut(entry.values, int(kept[entry.row]))))
        for chunk in result.prompt_logprobs:
            if table.epoch[chunk.slot] == chunk.epoch:
                request = table.requests[chunk.slot]
                assert request is not None
                events.prompt_logprobs.append((request, chunk))
        for pooled in result.pooled:
            if table.epoch[pooled.slot] == pooled.epoch:
                request = table.requests[pooled.slot]
                assert request is not None
                events.pooled.append((request, pooled))
                self._life.finish(request, "stop")

    def _keep_drafts(self, plan: StepPlan, result: StepResult, live: Bool) -> None:
        table, drafts, parents = self._table, result.next_drafts, result.next_draft_parents
        assert drafts is not None
        for row in np.flatnonzero(live & (drafts.lengths > 0)).tolist():
            slot = int(plan.slots[row])
            # Forced tokens moved the end of the known tokens; proposals for the old end are void.
            if result.forced is not None and len(result.forced.row(row)):
                continue
            room = int(table.max_total[slot] - table.num_known[slot]) - 1
            ids = drafts.row(row)[: max(room, 0)]
            if len(ids) and table.num_placeholders[slot] == 0:
                table.drafts[slot] = (ids, None if parents is None else parents.row(row)[: len(ids)])
                table.num_drafts[slot] = len(ids)

    def _fail(self, result: StepResult) -> None:
        for failure in result.errors:
            if self._table.epoch[failure.slot] == failure.epoch:
                self._abort(failure.slot, failure.message)

    def _constraints(self, result: StepResult) -> None:
        for status in result.constraints:
            if self._table.epoch[status.slot] != status.epoch:
                continue
            request = self._table.requests[status.slot]
            assert request is not None
            if status.state == ConstraintState.READY:
                self._life.release(request, "core", "grammar")
            elif status.state == ConstraintState.FAILED:
                self._life.finish(request, "error", message=status.message)
            elif status.state == ConstraintState.TERMINATED:
                self._life.finish(request, "stop")

    def _undo(self, plan: StepPlan, live: Bool) -> None:
        table = self._table
        slots = plan.slots[live]
        table.num_computed[slots] = np.minimum(table.num_computed[slots], plan.num_computed[live])
        table.num_committed[slots] = np.minimum(table.num_committed[slots], table.num_computed[slots])
        table.num_drafts[slots] = 0
        self._restart([s for s in slots.tolist() if table.in_flight[s] > 0])

    def _restart(self, slots: list[int]) -> None:
        # Later steps are under way that build on what is now void: only a new epoch makes their results stale.
        for slot in slots:
            self._life.preempt(slot)


def _cut(values: TokenLogprobs, count: int) -> TokenLogprobs:
    """The logprobs of the first ``count`` tokens: a stop may have cut the rest off."""
    if len(values.ranks) <= count:
        return values
    return TokenLogprobs(values.token_ids[:count], values.logprobs[:count], values.ranks[:count])


def _joined(accepted: Ragged, forced: Ragged) -> tuple[Int32, Int32]:
    parts = [np.concatenate([accepted.row(i), forced.row(i)]) for i in range(len(accepted))]
    counts = np.array([len(p) for p in parts], np.int32)
    return counts, np.concatenate(parts).astype(np.int32) if parts else accepted.values
