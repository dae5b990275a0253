"""One worker in the process of the engine, on the engine's thread or on one of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from trivet.errors import WorkerFault
from trivet.roles.executor import Executor, PendingStep
from trivet_inline.options import InlineOptions

if TYPE_CHECKING:
    from trivet.context import EngineContext, WorkerContext
    from trivet.plan import StepPlan
    from trivet.result import StepResult
    from trivet.roles import KVLayout, Runner, WorkerInfo

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
    """Builds a worker's context from the engine's own plugins.

    Every plan runs in :meth:`submit` on the engine's thread; or, with ``async_scheduling``, in the order of submission
    on a thread that also loads the model and does whatever else the worker is asked for, while the engine plans one
    more step. The worker then feeds the tokens it drew into its next step by itself."""

    role: ClassVar[str] = "executor"
    max_in_flight = 1
    token_feedback = False

    def __init__(self, context: EngineContext, options: object = None) -> None:
        self._context = context
        self._worker: WorkerContext | None = None
        self._thread: ThreadPoolExecutor | None = None
        if isinstance(options, InlineOptions) and options.async_scheduling:
            self.max_in_flight, self.token_feedback = 2, True

    def start(self) -> WorkerInfo:
        # The number of threads that libraries compute with, and a device's current stream, belong to a thread.
        if self.token_feedback:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="trivet-worker")
        self._worker = self._context.worker_context(rank=0, world_size=1)
        return self._do(self._load)

    def _load(self) -> WorkerInfo:
        assert self._worker is not None
        runner: Runner = self._worker.get("runner")
        self._runner = runner
        return runner.load()

    def _do(self, work: Callable[_P, _T], *args: _P.args, **keywords: _P.kwargs) -> _T:
        """Have the worker do something between steps, and wait for it."""
        if self._thread is None:
            return work(*args, **keywords)
        return self._thread.submit(work, *args, **keywords).result()

    def configure_cache(self, layout: KVLayout) -> None:
        self._do(self._runner.allocate, layout)

    def submit(self, plan: StepPlan) -> PendingStep:
        if self._thread is not None:
            return self._thread.submit(self._execute, plan)
        try:
            return FinishedStep(self._runner.execute(plan))
        except Exception as exc:  # noqa: BLE001 - raised where the engine takes the result, as with every executor
            return FinishedStep(exc)

    def _execute(self, plan: StepPlan) -> StepResult:
        """A step on the worker's thread; what would end that thread must not end the engine's in its place."""
        try:
            return self._runner.execute(plan)
        except Exception:
            raise
        except BaseException as error:
            raise WorkerFault(f"the worker's thread was told to end: {error!r}") from error

    def call(self, method: str, *args: Any) -> list[Any]:
        if method.startswith("_") or not callable(getattr(self._runner, method, None)):
            raise AttributeError(f"{type(self._runner).__name__} has no public method {method!r}")
        return [self._do(getattr(self._runner, method), *args)]

    def check_integrity(self) -> None:
        self._do(self._runner.check_integrity)

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                self._do(worker.shutdown_all)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
