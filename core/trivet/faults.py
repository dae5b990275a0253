"""What happens when a plugin raises, by the phase it raised in.

In the run phase the requests of that plan end with the error and the engine goes on: whatever the step wrote is in
blocks that only those requests had. In schedule or commit the state itself is suspect: every request ends with the
error and the engine takes no more work."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trivet.errors import EngineUnhealthyError, WorkerFault
from trivet.plan import StepPlan
from trivet.result import StepResult
from trivet.roles import PendingStep, ScheduleInputs

if TYPE_CHECKING:
    from trivet.assembly import Parts

logger = logging.getLogger("trivet.engine")

_PERSIST_SECONDS, _PERSIST_BLOCKS = 20.0, 256  # what a shutdown may take for storing; blocks per plan

Flying = deque[tuple[StepPlan, PendingStep, float]]
"""Steps in flight, oldest first: the plan, its result to come, the seconds that scheduling took."""


class _Failed:
    """A step that reached the workers although the run phase then raised: waited for, and not used."""

    def __init__(self, pending: PendingStep, error: BaseException) -> None:
        self._pending, self._error = pending, error
        self.report: StepResult | None = None

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> StepResult:
        self.report = self._pending.result()
        if isinstance(self._error, Exception):
            raise self._error
        raise WorkerFault(describe(self._error))  # an interrupt has been raised where it happened


class _Suspect(AbstractContextManager[None]):
    """See :meth:`Faults.suspect`. A generator would do, in several times the time, twice in every step."""

    __slots__ = ("_faults", "_leg")

    def __init__(self, faults: Faults, leg: str) -> None:
        self._faults, self._leg = faults, leg

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is None:
            return False
        logger.error("%s failed; the engine stops", self._leg, exc_info=error)
        self._faults.fail(f"{self._leg} failed: {describe(error)}", error)
        return isinstance(error, Exception)


class Faults:
    """Runs the legs of the loop and turns exceptions into ended requests."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self.reason: str | None = None
        self.cause: BaseException | None = None
        #: why another thread found a step hanging, which this engine's own thread cannot; it fails once it can
        self.hang: str | None = None
        self._stopped = False
        self._submitted: PendingStep | None = None
        parts.hooks.bind("run", self._submit)

    @property
    def healthy(self) -> bool:
        """Whether the engine takes work."""
        return self.reason is None and not self._stopped

    def check_healthy(self) -> None:
        """Raise :class:`EngineUnhealthyError` with the reason."""
        if self._stopped:
            raise EngineUnhealthyError("the engine has been shut down")
        reason = self.reason or self.hang
        if reason is not None:
            raise EngineUnhealthyError(f"the engine stopped after a fault and must be restarted: {reason}")

    def suspect(self, leg: str) -> AbstractContextManager[None]:
        """Around schedule and commit: an exception ends everything; an interrupt does too, and goes on its way."""
        return _Suspect(self, leg)

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Turn unhealthy: every request ends with ``reason``."""
        if self.reason is not None:
            return
        self.reason, self.cause = reason, cause
        self._end_all("error", reason)
        self._p.hooks.engine_stopped(reason)

    def _end_all(self, reason: str, message: str | None = None) -> None:
        life = self._p.lifecycle
        for request in list(life.requests.values()):
            try:
                life.finish(request, reason, message=message)
            except Exception:
                # The state may be suspect here; the request must end all the same.
                logger.exception("ending %s failed", request.request_id)
                life.force_end(request, reason, message)

    def _submit(self, plan: StepPlan) -> PendingStep:
        self._submitted = self._p.executor.submit(plan)
        self._p.lifecycle.submitted(plan)
        return self._submitted

    def _taken(self) -> PendingStep | None:
        return self._submitted

    def send(self, plan: StepPlan, seconds: float, flying: Flying) -> bool:
        """The run leg: adds the plan to those in flight; False when it did not get out (its requests have ended)."""
        self._submitted = None
        try:
            flying.append((plan, self._p.hooks.run(plan), seconds))
        except BaseException as error:
            sent = self._taken()
            if sent is not None:
                flying.append((plan, _Failed(sent, error), seconds))
            else:
                logger.exception("sending step %d failed", plan.step_id)
                self._p.lifecycle.unsent(plan)
                self._abandon(plan, error, sent=False)
            if not isinstance(error, Exception):
                raise
            return sent is not None
        return True

    def result(self, plan: StepPlan, pending: PendingStep) -> StepResult | None:
        """Wait for a step; None when it failed (its requests have ended). After an interrupt it can be waited for
        again."""
        try:
            return pending.result()
        except Exception as error:
            logger.exception("step %d failed", plan.step_id)
            self._abandon(plan, error, pending.report if isinstance(pending, _Failed) else None)
            return None

    def _abandon(
        self, plan: StepPlan, error: BaseException, report: StepResult | None = None, *, sent: bool = True
    ) -> None:
        with self.suspect("commit"):
            self._p.committer.abandon(plan, describe(error), report, sent=sent)
        try:
            self._p.executor.check_health()
        except Exception as lost:  # noqa: BLE001 - whatever an executor raises here, its workers are gone
            self.fail(describe(lost))

    def tell_blocks(self) -> None:
        """Pass on what the cache says of its blocks."""
        cache, hooks = self._p.cache, self._p.hooks
        if cache.has_events:
            stored, evicted = cache.take_events()
            for lost in evicted:
                hooks.blocks_evicted(lost)
            for found in stored:
                hooks.blocks_stored(found)

    def stop(self, flying: Flying, report: Callable[[], object]) -> None:
        """Abort what is left, let steps in flight end, ``report`` the ends, shut every part down."""
        if self._stopped:
            return
        self._stopped = True
        try:
            self._end_all("abort")
            while flying:
                plan, pending, _ = flying.popleft()
                result = self.result(plan, pending)
                if result is not None and self.reason is None:
                    with self.suspect("commit"):
                        self._p.committer.commit(plan, result)
            report()
            if self.reason is None:
                self._persist()
                self._p.hooks.engine_stopped("shutdown")
        finally:
            self._p.shutdown()

    def _persist(self) -> None:
        """Let tiers have what should outlive the process, the latest first, for as long as that may take."""
        p, deadline = self._p, time.monotonic() + _PERSIST_SECONDS
        try:
            while time.monotonic() < deadline and p.cache.persist(_PERSIST_BLOCKS):
                p.planner.begin(ScheduleInputs(p.planner.step_id + 1, 0, 0))
                plan = p.planner.finish()
                p.committer.commit(plan, self._submit(plan).result())
        except Exception:
            logger.exception("not all of the KV cache could be stored; the rest is computed again after a restart")


def describe(error: BaseException) -> str:
    """An exception in one line, with the plugin's name if the facade noted it."""
    notes: list[Any] = getattr(error, "__notes__", [])
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({'; '.join(map(str, notes))})" if notes else text
