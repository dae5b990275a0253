"""A scheduler of its own: short prompts do not wait behind long ones, and long ones do not wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from trivet.plan import Int32, StepPlan
from trivet.roles import ScheduleInputs, Scheduler, SchedulerLimits, Wait
from trivet_schemas.options import Options

if TYPE_CHECKING:
    from trivet.context import Context, EngineContext
    from trivet.state import Request


class ShortestOptions(Options):
    """Options of ``acme_shortest``."""

    max_num_seqs: int = Field(64, ge=1)
    """Most requests that run at once."""
    max_num_batched_tokens: int = Field(1024, ge=1)
    """Token budget of a step."""
    patience: int = Field(100, ge=0)
    """Steps after which a request goes before shorter ones."""


class ShortestFirst(Scheduler):
    """Running requests first, in the order of their admission; then the shortest prompt, or whoever waited too long."""

    def __init__(self, context: Context, options: ShortestOptions) -> None:
        self._limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens)
        self._patience = options.patience
        self._waiting: dict[Request, int] = {}  # request → the step in which it was queued
        self._unserved: set[int] = set()
        self._stalled = "turn"
        self._step = 0

    @property
    def limits(self) -> SchedulerLimits:
        return self._limits

    def bind(self, context: EngineContext) -> None:
        self._planner, self._table = context.planner, context.table

    def add(self, request: Request) -> None:
        self._waiting[request] = self._step

    def requeue(self, request: Request) -> None:
        self._waiting[request] = self._step - self._patience - 1  # it has waited long enough before

    def remove(self, request: Request) -> None:
        self._waiting.pop(request, None)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def schedule(self, inputs: ScheduleInputs) -> StepPlan:
        planner = self._planner
        self._step = inputs.step_id
        inputs.token_budget = min(inputs.token_budget, self._limits.max_num_batched_tokens)
        planner.begin(inputs)
        self._extend(planner.runnable())
        if not planner.num_preempted:
            self._admit()
        return planner.finish()

    def _extend(self, slots: Int32) -> None:
        """Tokens for what runs; when blocks are short, the newest gives its own back."""
        planner = self._planner
        pending = planner.pending(slots)
        counts = np.clip(planner.tokens_left - (np.cumsum(pending) - pending), 0, pending).astype(np.int32)
        self._unserved = set(slots[counts == 0].tolist())
        slots, counts = slots[counts > 0], counts[counts > 0]
        while len(slots):
            done = planner.extend(slots, counts)
            slots, counts = slots[done:], counts[done:]
            if not len(slots) or planner.memory_pending:
                self._unserved |= set(slots.tolist())
                return
            running = self._table.order
            victim = int(running[~planner.planned(running)][-1])
            planner.preempt(victim)
            slots, counts = slots[slots != victim], counts[slots != victim]

    def _admit(self) -> None:
        for request in sorted(self._waiting, key=self._place):
            if self._planner.is_held(request):
                continue
            if self._planner.tokens_left < 1:
                self._stalled = "compute"
                return
            # Room to grow in after a preemption, or it would be preempted again at once.
            reserve = 16 << min(request.num_preemptions, 8) if request.num_preemptions else 0
            admission = self._planner.admit(request, self._planner.tokens_left, reserve=reserve)
            if not admission.ok:
                self._stalled = admission.reason
                return
            del self._waiting[request]

    def _place(self, request: Request) -> tuple[bool, int, int]:
        overdue = self._step - self._waiting[request] > self._patience
        return not overdue, 0 if overdue else request.num_prompt, request.index

    def explain(self, request: Request) -> Wait | None:
        if request.slot >= 0:
            if request.slot not in self._unserved:
                return None
            return Wait("compute", "the step's tokens and blocks went to requests admitted before it")
        place = sorted(self._waiting, key=self._place).index(request)
        waited = self._step - self._waiting[request]
        return Wait(self._stalled, f"{place} shorter prompts are ahead of it", {"ahead": place, "steps": waited})
