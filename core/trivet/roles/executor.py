"""Role ``executor``: where the workers run, and how a plan gets to them."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from trivet.plan import StepPlan
from trivet.result import StepResult
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.kv import KVLayout
    from trivet.roles.runner import WorkerInfo


class PendingStep(Protocol):
    """A step on its way; steps end in the order of their submission."""

    def done(self) -> bool:
        """Whether :meth:`result` would return at once."""
        ...

    def result(self) -> StepResult:
        """Wait for the step. An exception of a worker phase is raised here, as :class:`trivet.errors.WorkerFault`
        (or itself, in the same process). Can be called again when an interrupt (KeyboardInterrupt) ended it."""
        ...


class Executor(Role):
    """Runs a runner in each worker. Methods are called on the engine's thread."""

    role: ClassVar[str] = "executor"
    #: steps that may be submitted before the first one's result is taken
    max_in_flight: int = 1
    #: whether a worker feeds the token it sampled into its next step by itself; else a request is in one step at most
    token_feedback: bool = False

    @abstractmethod
    def start(self) -> WorkerInfo:
        """Start workers and load the model."""

    @abstractmethod
    def configure_cache(self, layout: KVLayout) -> None:
        """Allocate KV storage on every worker."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> PendingStep:
        """Send a plan; returns without waiting where the executor can. Bound to the ``trivet_run`` phase."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a public method of every worker's runner between steps, in rank order (plain data in and out)."""

    def check_health(self) -> None:
        """Raise when a worker is gone; the message says which and how it ended."""
