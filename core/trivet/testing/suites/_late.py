"""An executor in this process that runs a step only when its result is taken, so that several are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from trivet.hookspecs import hookimpl
from trivet.provider import Provider
from trivet.roles import Executor, KVLayout, Runner, WorkerInfo
from trivet_schemas.options import Options

if TYPE_CHECKING:
    from trivet.plan import StepPlan
    from trivet.result import StepResult


class LateOptions(Options):
    """Options of the executor ``late``."""

    depth: int = Field(2, ge=1)
    """Steps in flight."""


class LateExecutor(Executor):
    """Plans wait in a queue until the oldest one's result is asked for."""

    def __init__(self, context: Any, options: LateOptions) -> None:
        self._context = context
        self.max_in_flight, self.token_feedback = options.depth, options.depth > 1
        self._waiting: deque[_Late] = deque()

    def start(self) -> WorkerInfo:
        """Build the worker from the engine's own plugins."""
        self._worker = self._context.worker_context(rank=0, world_size=1)
        self.runner: Runner = self._worker.get("runner")
        info: WorkerInfo = self.runner.load()
        return info

    def configure_cache(self, layout: KVLayout) -> None:
        """Allocate."""
        self.runner.allocate(layout)

    def submit(self, plan: StepPlan) -> _Late:
        """Queue a plan."""
        step = _Late(self, plan)
        self._waiting.append(step)
        return step

    def take(self, step: _Late) -> StepResult:
        """Run the oldest plan."""
        assert self._waiting.popleft() is step, "results are taken in the order of submission"
        return self.runner.execute(step.plan)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call the runner."""
        if method.startswith("_") or not hasattr(self.runner, method):
            raise AttributeError(f"the runner has no public method {method!r}")
        return [getattr(self.runner, method)(*args)]

    def shutdown(self) -> None:
        """Shut the worker down."""
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.shutdown_all()


class _Late:
    def __init__(self, executor: LateExecutor, plan: StepPlan) -> None:
        self._executor, self.plan = executor, plan
        self._taken = False

    def done(self) -> bool:
        return self._taken

    def result(self) -> StepResult:
        self._taken = True
        return self._executor.take(self)


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The executor's descriptor."""
    return [Provider("executor", "late", f"{__name__}:LateExecutor", options=LateOptions)]
