"""One worker in the process of the engine, called synchronously."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.roles.executor import Executor, PendingStep

if TYPE_CHECKING:
    from trivet.context import EngineContext, WorkerContext
    from trivet.plan import StepPlan
    from trivet.result import StepResult
    from trivet.roles import KVLayout, Runner, WorkerInfo


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that has ended, with its result or its exception."""

    outcome: StepResult | Exception

    def done(self) -> bool:
        """Always: the step ran when it was submitted."""
        return True

    def result(self) -> StepResult:
        """The result; raises what a worker phase raised."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class InlineExecutor(Executor):
    """Builds a worker's context from the engine's own plugins, and runs every plan in :meth:`submit` on the engine's
    thread."""

    role: ClassVar[str] = "executor"
    max_in_flight = 1
    token_feedback = False

    def __init__(self, context: EngineContext, options: object = None) -> None:
        self._context = context
        self._worker: WorkerContext | None = None

    def start(self) -> WorkerInfo:
        self._worker = self._context.worker_context(rank=0, world_size=1)
        runner: Runner = self._worker.get("runner")
        self._runner = runner
        return runner.load()

    def configure_cache(self, layout: KVLayout) -> None:
        self._runner.allocate(layout)

    def submit(self, plan: StepPlan) -> PendingStep:
        try:
            return FinishedStep(self._runner.execute(plan))
        except Exception as exc:  # noqa: BLE001 - raised where the engine takes the result, as with every executor
            return FinishedStep(exc)

    def call(self, method: str, *args: Any) -> list[Any]:
        if method.startswith("_") or not callable(getattr(self._runner, method, None)):
            raise AttributeError(f"{type(self._runner).__name__} has no public method {method!r}")
        return [getattr(self._runner, method)(*args)]

    def check_integrity(self) -> None:
        self._runner.check_integrity()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown_all()
            self._worker = None
