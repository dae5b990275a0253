"""The engine: a loop of three legs, schedule → run → commit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trivet.admission import Admissions
from trivet.assembly import Parts, assemble
from trivet.errors import RequestError
from trivet.events import CommitEvents, StepFinished
from trivet.faults import Faults, Flying
from trivet.plan import StepPlan
from trivet.roles import ScheduleInputs, Wait

if TYPE_CHECKING:
    from trivet.state import Request

_IDLE_SECONDS = 0.002  # how long a step waits for an outside event when every request is held


class Engine:
    """Requests in, tokens out. Not thread-safe: one thread calls everything (see :class:`trivet.AsyncEngine`)."""

    def __init__(self, config: Any, plugins: Sequence[object] = ()) -> None:
        self.parts: Parts = assemble(config, plugins)
        p = self.parts
        self.config, self.context, self.hooks, self.model = p.config, p.context, p.hooks, p.info.model
        self.tokenizer, self.max_model_len, self.table = p.tokenizer, p.max_model_len, p.table
        self._admissions = Admissions(p)
        self._faults = Faults(p)
        self._flying: Flying = deque()
        self._wake = threading.Event()
        p.wake, p.context.on_explain = self._wake.set, self.explain
        self._step_id = 0
        self.hooks.engine_started(self.context)

    # ------------------------------------------------------------------ the loop

    def step(self) -> CommitEvents:
        """One turn: send plans while steps may be in flight, then commit the oldest. Never raises for a plugin's
        fault."""
        life, depth = self.parts.lifecycle, self.parts.executor.max_in_flight
        life.apply_releases()
        life.apply_aborts()
        self._admissions.tell()
        while len(self._flying) < depth and self._faults.healthy:
            plan, seconds = self._schedule()
            if plan is None or not self._faults.send(plan, seconds, self._flying):
                break
        if self._flying:
            events = self._settle()
        else:
            events = CommitEvents(self._step_id)
            if not life.ended and self.has_work and self._wake.wait(_IDLE_SECONDS):
                self._wake.clear()
        events.finished = self._admissions.take_ended()
        return events

    def _schedule(self) -> tuple[StepPlan | None, float]:
        start = time.perf_counter()
        limits = self.parts.limits
        inputs = ScheduleInputs(self._step_id + 1, limits.max_num_batched_tokens, limits.max_num_seqs)
        with self._faults.suspect("schedule"):
            self._step_id += 1
            plan = self.hooks.schedule(inputs)
            # With steps in flight, reports arrive anyway; a plan without rows is only for asking.
            life = self.parts.lifecycle
            useful = plan.num_rows or plan.new or plan.loads or plan.stores
            if useful or (life.waits_for_workers and not self._flying):
                return plan, time.perf_counter() - start
            life.unsent(plan)
        return None, 0.0

    def _settle(self) -> CommitEvents:
        start = time.perf_counter()
        plan, pending, scheduling = self._flying[0]
        result = self._faults.result(plan, pending)
        self._flying.popleft()
        if result is None:
            return CommitEvents(plan.step_id)
        ran = time.perf_counter()
        events = CommitEvents(plan.step_id)
        with self._faults.suspect("commit"):
            events = self.hooks.commit(plan, result)
            self._faults.tell_blocks()
        if self.hooks.has_observers("step_finished"):
            legs = {"schedule": scheduling, "run": ran - start, "commit": time.perf_counter() - ran}
            self.hooks.step_finished(StepFinished(plan, result, events, legs | result.timings))
        return events

    # ------------------------------------------------------------------ requests

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: Any, **details: Any) -> Request:
        """Validate and queue a request. ``details``: priority, arrival_time, prompt, adapter, cache_tags, parent,
        ranges, extra.

        Raises :class:`trivet.errors.RequestError` naming field, value and rule; nothing is allocated then.
        """
        self._faults.check_healthy()
        return self._admissions.add(request_id, prompt_token_ids, params, **details)

    def validate(self, prompt_token_ids: Sequence[int], params: Any) -> None:
        """Raise what :meth:`add_request` would for such a request, and queue nothing."""
        self._admissions.validate(prompt_token_ids, params)

    def abort(self, request_ids: str | Iterable[str], reason: str = "abort") -> None:
        """End a request or several at once; ids that are unknown or ended have no effect."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.parts.lifecycle.requests.get(request_id)
            if request is not None:
                self.parts.lifecycle.finish(request, reason)
        self._wake.set()

    def stop(self, request_id: str, num_tokens: int, stop_reason: str | None = None) -> None:
        """End a request whose output is complete after ``num_tokens`` tokens (a stop string was found).

        No effect for an unknown or ended one. Raises RequestError when it has fewer tokens than that."""
        request = self.parts.lifecycle.requests.get(request_id)
        if request is not None:
            known = self.table.num_output(request)
            if not 0 <= num_tokens <= known:
                raise RequestError(
                    f"{request_id!r} cannot be stopped after {num_tokens} tokens: it has {known}", param="num_tokens"
                )
            self.parts.lifecycle.finish(request, "stop", stop_reason=stop_reason, num_output=num_tokens)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to do or to report."""
        # A transfer's end is reported with a step, and there are no more steps after a fault.
        return self.has_unfinished or (self.parts.lifecycle.has_transfers and self._faults.healthy)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended, an end has not been reported, or a step is in flight. Unlike
        :attr:`has_work` it does not wait for transfers, which depend on what is outside."""
        life = self.parts.lifecycle
        return bool(life.requests or self._flying or life.ended)

    def explain(self, request_id: str) -> Wait | None:
        """Why a request did not advance in the last step: compute, memory, turn, or a hold, with numbers."""
        return self._admissions.explain(request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        self.parts.lifecycle.check_integrity()

    @property
    def fault(self) -> str | None:
        """Why the engine is unhealthy, or None."""
        return self._faults.reason

    @property
    def fault_cause(self) -> BaseException | None:
        """The exception behind :attr:`fault`, if there was one."""
        return self._faults.cause

    def shutdown(self) -> None:
        """Stop; what has not finished is aborted. A second call has no effect."""
        self._faults.stop(self._flying, self._admissions.take_ended)
