"""The engine: a loop of three legs, schedule → run → commit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trivet.admission import Admissions
from trivet.assembly import Parts, assemble
from trivet.events import CommitEvents, StepFinished
from trivet.faults import Faults, Flying
from trivet.plan import StepPlan
from trivet.roles import ScheduleInputs, Wait
from trivet.watchdog import Watchdog

if TYPE_CHECKING:
    from trivet.state import Request
    from trivet.timeline import RequestTimeline

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
        self._history, self.watchdog = p.lifecycle.history, Watchdog(p, self._faults, self._admissions)
        self._flying: Flying = deque()
        self._wake = threading.Event()
        p.wake, p.context.on_explain = self._wake.set, self._admissions.explain
        self._step_id = 0
        self.hooks.engine_started(self.context)

    # ------------------------------------------------------------------ the loop

    def step(self) -> CommitEvents:
        """One turn: send plans while steps may be in flight, then commit the oldest. Never raises for a plugin's
        fault."""
        with self.watchdog:
            events = self._turn()
        events.finished = self._admissions.take_ended()
        return events

    def _turn(self) -> CommitEvents:
        life, depth = self.parts.lifecycle, self.parts.executor.max_in_flight
        life.apply_releases()
        life.apply_aborts()
        self._admissions.tell()
        while len(self._flying) < depth and self._faults.healthy:
            plan, seconds = self._schedule()
            if plan is None or not self._faults.send(plan, seconds, self._flying):
                break
        if self._flying:
            return self._settle()
        if not life.ended and self.has_work and self._wake.wait(_IDLE_SECONDS):
            self._wake.clear()
        return CommitEvents(self._step_id)

    def _schedule(self) -> tuple[StepPlan | None, float]:
        start = time.perf_counter()
        limits = self.parts.limits
        inputs = ScheduleInputs(self._step_id + 1, limits.max_num_batched_tokens, limits.max_num_seqs)
        with self._faults.suspect("schedule"):
            self._step_id += 1
            self._history.step = self._step_id
            plan = self.hooks.schedule(inputs)
            holds, busy, life = self.parts.planner.step_holds, bool(self._flying), self.parts.lifecycle
            seconds = time.perf_counter() - start
            if life.wants(plan, busy=busy):
                self._history.sent(plan, inputs, holds, seconds)
                return plan, seconds
            life.unsent(plan)
            self._history.unsent(inputs, holds, busy=busy)
        return None, 0.0

    def _settle(self) -> CommitEvents:
        start = time.perf_counter()
        plan, pending, scheduling = self._flying[0]
        result = self._faults.result(plan, pending)
        self._flying.popleft()
        events, ran = CommitEvents(plan.step_id), time.perf_counter()
        if result is None:
            return events
        with self._faults.suspect("commit"):
            events = self.hooks.commit(plan, result)
            self._faults.tell_blocks()
        legs = {"schedule": scheduling, "run": ran - start, "commit": time.perf_counter() - ran}
        self._history.committed(plan, events, legs)
        if self.hooks.has_observers("step_finished"):
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
        self._admissions.abort([request_ids] if isinstance(request_ids, str) else list(request_ids), reason)
        self._wake.set()

    def stop(self, request_id: str, num_tokens: int, stop_reason: str | None = None) -> None:
        """End a request whose output is complete after ``num_tokens`` tokens (a stop string was found).

        No effect for an unknown or ended one. Raises RequestError when it has fewer tokens than that."""
        self._admissions.stop(request_id, num_tokens, stop_reason)

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
        """Why a request did not advance in the last step, and when and why it waited so far (``history``)."""
        return self._admissions.explain(request_id, history=True)

    def timeline(self, request_id: str, *, spans: bool = True) -> RequestTimeline | None:
        """The whole story of a request that is unfinished or ended not long ago; without ``spans`` the sums alone."""
        return self._history.timeline(request_id, spans=spans)

    def recent_steps(self, count: int | None = None) -> list[dict[str, Any]]:
        """The last ``count`` steps (None: all that are remembered) as plain data, oldest first."""
        return self._history.recent(count)

    def check_integrity(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        self.parts.lifecycle.check_integrity()

    @property
    def fault(self) -> str | None:
        """Why the engine is unhealthy, or None. May be asked by any thread, also while a step hangs."""
        return self._faults.reason or self._faults.hang

    @property
    def fault_cause(self) -> BaseException | None:
        """The exception behind :attr:`fault`, if there was one."""
        return self._faults.cause

    def shutdown(self) -> None:
        """Stop; what has not finished is aborted. A second call has no effect."""
        self._faults.stop(self._flying, self._admissions.take_ended)
