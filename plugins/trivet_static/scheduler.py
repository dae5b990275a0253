"""The classic batch: the baseline for every comparison, and the smallest complete scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trivet.plan import StepPlan
from trivet.roles import ScheduleInputs, Scheduler, SchedulerLimits, StepWaits, Wait

if TYPE_CHECKING:
    from trivet.context import Context, EngineContext
    from trivet.state import Request
    from trivet_static.options import StaticOptions


class StaticScheduler(Scheduler):
    """Fills a batch, with room for every request's whole length, and takes the next one when all of it has ended."""

    def __init__(self, context: Context | None, options: StaticOptions) -> None:
        self._limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens)
        self._queue: dict[str, Request] = {}
        #: requests of the batch that runs which the cache held at their admission, until others' work can be shared
        self._late: dict[str, Request] = {}
        self._unserved: frozenset[int] = frozenset()

    @property
    def limits(self) -> SchedulerLimits:
        """See :attr:`Scheduler.limits`."""
        return self._limits

    def bind(self, context: EngineContext) -> None:
        """See :meth:`Scheduler.bind`."""
        self._planner, self._table = context.planner, context.table

    def add(self, request: Request) -> None:
        """See :meth:`Scheduler.add`."""
        self._queue[request.request_id] = request

    def requeue(self, request: Request) -> None:
        """See :meth:`Scheduler.requeue`; this scheduler preempts nothing itself, the core may after a fault."""
        self._queue[request.request_id] = request

    def remove(self, request: Request) -> None:
        """See :meth:`Scheduler.remove`."""
        if self._queue.get(request.request_id) is request:
            del self._queue[request.request_id]
            self._late.pop(request.request_id, None)

    @property
    def num_waiting(self) -> int:
        """See :attr:`Scheduler.num_waiting`."""
        return len(self._queue)

    def schedule(self, inputs: ScheduleInputs) -> StepPlan:
        """See :meth:`Scheduler.schedule`."""
        planner = self._planner
        inputs.token_budget = min(inputs.token_budget, self._limits.max_num_batched_tokens)
        planner.begin(inputs)
        if self._table.num_running == 0:
            self._late.clear()
            self._fill(list(self._queue.values()))
        elif self._late:
            self._fill([request for request in self._late.values() if not request.holds])
        slots = planner.runnable()
        wanted = planner.pending(slots)
        counts = np.clip(planner.tokens_left - (np.cumsum(wanted) - wanted), 0, wanted).astype(np.int32)
        self._unserved = frozenset(slots[counts == 0].tolist())
        planner.extend(slots[counts > 0], counts[counts > 0])
        return planner.finish()

    def _fill(self, requests: list[Request]) -> None:
        # By arrival: a request that the core put back stands at the end of the map.
        for request in sorted(requests, key=lambda r: r.index):
            was_held = bool(request.holds)
            # Room for all it may become, so that nothing has to be taken back while the batch runs.
            admission = self._planner.admit(request, self._planner.tokens_left, reserve=request.max_total)
            if admission.ok:
                del self._queue[request.request_id]
                self._late.pop(request.request_id, None)
            elif admission.reason != "hold":
                break
            elif request.holds and not was_held:
                self._late[request.request_id] = request

    def waits(self) -> StepWaits:
        """See :meth:`Scheduler.waits`; those that the cache holds are no concern of the batch."""
        waiting = len(self._queue) - len(self._late)
        if waiting < 1:
            return StepWaits(compute=self._unserved)
        running = self._table.num_running
        detail = _batch(running)
        return StepWaits(Wait("turn", detail, {"running": running, "waiting": waiting}), self._unserved)

    def explain(self, request: Request) -> Wait | None:
        """See :meth:`Scheduler.explain`."""
        if request.slot >= 0:
            if request.slot not in self._unserved:
                return None
            budget = self._limits.max_num_batched_tokens
            return Wait("compute", f"the step's token budget of {budget} went to others", {"token_budget": budget})
        ahead, running = sum(r.index < request.index for r in self._queue.values()), self._table.num_running
        detail = f"{_batch(running)}; {ahead} {'is' if ahead == 1 else 'are'} ahead of it"
        return Wait("turn", detail, {"running": running, "ahead": ahead})


def _batch(running: int) -> str:
    return f"a batch of {running} request{'' if running == 1 else 's'} runs until its last one has ended"
