"""Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.errors import OverloadedError
from trivet.plan import Int32, StepPlan
from trivet.roles import ScheduleInputs, Scheduler, SchedulerLimits, Wait
from trivet_continuous.queue import WaitingQueue

if TYPE_CHECKING:
    from trivet.context import Context, EngineContext
    from trivet.state import Request
    from trivet_continuous.options import ContinuousOptions

_FIRST_RESERVE = 2  # tokens; doubles with every preemption of a request, so the first one asks for 4


class ContinuousScheduler(Scheduler):
    """Running requests first, then waiting ones, within a token budget.

    Rows that only decode get their tokens before prompts that are computed in chunks, so every running output
    advances in every step. Memory goes by admission order: when a row lacks blocks, victims are taken among the
    rows after it (or the row itself), so the oldest request always gets on. Nothing is admitted in a step that
    preempted, and a request that was preempted asks for more room at each return, which bounds how often that can
    happen."""

    def __init__(self, context: Context | None, options: ContinuousOptions) -> None:
        self._options = options
        self._limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens)
        self._stalled: tuple[str, dict[str, Any]] = ("turn", {})
        self._unserved: frozenset[int] = frozenset()  # running slots without tokens of the budget in the last step
        self._short: frozenset[int] = frozenset()  # running slots that wait for blocks

    @property
    def limits(self) -> SchedulerLimits:
        """See :attr:`Scheduler.limits`."""
        return self._limits

    def bind(self, context: EngineContext) -> None:
        """See :meth:`Scheduler.bind`."""
        self._planner, self._table = context.planner, context.table
        self._cache = context.get("cache")
        self._queue = WaitingQueue(context.component("scheduling_policy", self._options.policy))
        self._victim = context.component("victim_policy", self._options.victim)

    def add(self, request: Request) -> None:
        """See :meth:`Scheduler.add`."""
        bound = self._options.max_num_queued_reqs
        if bound is not None and len(self._queue) >= bound:
            raise OverloadedError(
                f"the queue is full: {len(self._queue)} requests wait (max_num_queued_reqs = {bound})"
            )
        self._queue.push(request)

    def requeue(self, request: Request) -> None:
        """See :meth:`Scheduler.requeue`."""
        self._queue.push(request)

    def remove(self, request: Request) -> None:
        """See :meth:`Scheduler.remove`."""
        self._queue.remove(request)

    def released(self, request: Request) -> None:
        """See :meth:`Scheduler.released`."""
        self._queue.unpark(request)

    @property
    def num_waiting(self) -> int:
        """See :attr:`Scheduler.num_waiting`."""
        return len(self._queue)

    def schedule(self, inputs: ScheduleInputs) -> StepPlan:
        """See :meth:`Scheduler.schedule`."""
        planner = self._planner
        inputs.token_budget = min(inputs.token_budget, self._limits.max_num_batched_tokens)
        planner.begin(inputs)
        slots = planner.runnable()
        counts = self._share(slots, planner.pending(slots))
        self._short = self._unserved = frozenset()
        given = counts > 0
        if np.count_nonzero(given) < len(slots):
            self._unserved = frozenset(slots[~given].tolist())
            slots, counts = slots[given], counts[given]
        self._extend(slots, counts)
        if planner.num_preempted:
            self._stalled = ("memory", {})
        else:
            self._admit()
        return planner.finish()

    def _share(self, slots: Int32, pending: Int32) -> Int32:
        """Tokens per row: decoding rows first, then prompts in admission order, until the budget is used up."""
        budget = self._planner.tokens_left
        total = int(np.add.reduce(pending))
        if total <= budget:
            return pending
        decoding = pending <= 1 + self._table.num_drafts[slots]
        order = np.r_[np.flatnonzero(decoding), np.flatnonzero(~decoding)]
        wanted = pending[order]
        before = np.cumsum(wanted) - wanted
        counts = np.zeros_like(pending)
        counts[order] = np.clip(budget - before, 0, wanted)
        return counts

    def _extend(self, slots: Int32, counts: Int32) -> None:
        planner = self._planner
        while len(slots):
            done = planner.extend(slots, counts)
            slots, counts = slots[done:], counts[done:]
            if not len(slots):
                break
            if planner.memory_pending:
                self._short = frozenset(slots.tolist())
                break
            # Only rows from the first unserved one on (in admission order) may lose their blocks.
            order = self._table.order
            rest = order[int(np.flatnonzero(order == slots[0])[0]) :]
            victim = self._victim(rest[~planner.planned(rest)], self._table)
            planner.preempt(victim)
            keep = slots != victim
            slots, counts = slots[keep], counts[keep]

    def _admit(self) -> None:
        planner, queue = self._planner, self._queue
        queue.unpark_passing()
        while (request := queue.head()) is not None:
            if planner.tokens_left < 1:
                self._stalled = ("compute", {})
                break
            reserve = _FIRST_RESERVE << min(request.num_preemptions, 20) if request.num_preemptions else 0
            admission = planner.admit(request, planner.tokens_left, reserve=reserve)
            if admission.ok:
                queue.pop(request)
            elif admission.reason == "hold":
                queue.park(request, passing=not request.holds)
            else:
                self._stalled = (admission.reason, {})
                break

    def explain(self, request: Request) -> Wait | None:
        """See :meth:`Scheduler.explain`."""
        if request.slot >= 0:
            if request.slot in self._unserved:
                budget = self._limits.max_num_batched_tokens
                return Wait("compute", f"the step's token budget of {budget} went to others", {"token_budget": budget})
            return self._explain_memory() if request.slot in self._short else None
        head = self._queue.head()
        if head is None or head is request:
            return self._explain_head()
        ahead = sum((self._queue.key(r), r.index) < (self._queue.key(request), request.index) for r in self._queue)
        return Wait("turn", f"{ahead} waiting requests are ahead of it", {"ahead": ahead})

    def check_integrity(self) -> None:
        """See :meth:`Role.check_integrity`."""
        self._queue.check_integrity()

    def _explain_memory(self) -> Wait:
        stats = self._cache.stats()
        detail = f"{stats.free} of {stats.total} blocks are free, too few for its known tokens"
        return Wait("memory", detail, {"free": stats.free, "total": stats.total})

    def _explain_head(self) -> Wait:
        reason, numbers = self._stalled
        if reason == "memory":
            return self._explain_memory()
        if reason == "compute":
            budget = self._limits.max_num_batched_tokens
            return Wait(
                "compute", f"the step's token budget of {budget} went to running requests", {"token_budget": budget}
            )
        running = self._table.num_running
        detail = f"{running} requests run, max_num_seqs is {self._limits.max_num_seqs}"
        return Wait("turn", detail, {"running": running, "max_num_seqs": self._limits.max_num_seqs, **numbers})
