"""Role ``scheduler``: which requests run, how many tokens each, who is preempted."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.plan import StepPlan
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.context import EngineContext
    from trivet.state import Request


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that the rest of the engine is built for."""

    max_num_seqs: int  #: slots: requests that can run at once
    max_num_batched_tokens: int  #: the largest token budget of a step


@dataclass(slots=True)
class ScheduleInputs:
    """What wrappers of ``trivet_schedule`` may change before the plan is made.

    ``token_budget`` and ``max_num_seqs`` can be lowered (values above the scheduler's limits are capped). ``holds``
    keeps the named requests from being scheduled in this step, with the reason that ``engine.explain`` gives."""

    step_id: int
    token_budget: int
    max_num_seqs: int
    holds: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """Consecutive steps in which a request did not advance, for one reason; those between in which it did are left out
    of ``steps``."""

    kind: str  #: as in :class:`Wait`; a hold's own kind (``grammar``, ``transfer``, ``parent``, …) for one that is held
    first_step: int
    last_step: int
    steps: int
    seconds: float
    detail: str = ""  #: of the last of these steps
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a request does not advance: ``compute`` (token budget), ``memory`` (blocks), ``turn`` (policy, slots),
    ``hold``."""

    kind: str
    detail: str
    numbers: dict[str, Any] = field(default_factory=dict)
    #: when and why it waited so far, oldest first; filled in by :meth:`trivet.Engine.explain`
    history: tuple[WaitSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class StepWaits:
    """Why requests did not advance in a step, for all of them at once; the engine keeps one per step."""

    #: why the next request of the queue was not admitted (``compute``, ``memory`` or ``turn``); None: nobody waits
    #: whom the scheduler could have admitted
    queue: Wait | None = None
    compute: frozenset[int] = frozenset()  #: running slots that got nothing of the token budget
    memory: frozenset[int] = frozenset()  #: running slots that lacked blocks


class Scheduler(Role):
    """Owns the waiting queue and decides each step; the mechanics are the planner's (``context.planner``).

    All methods run on the engine's thread. A scheduler sees columns (``context.table``) for running requests and
    :class:`trivet.state.Request` objects for waiting ones.
    """

    role: ClassVar[str] = "scheduler"

    @property
    @abstractmethod
    def limits(self) -> SchedulerLimits:
        """The sizes to build the engine for; read before :meth:`bind`."""

    @abstractmethod
    def bind(self, context: EngineContext) -> None:
        """Called once before the first request, with planner, table, cache and components in reach."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a new request. Raises :class:`trivet.errors.OverloadedError` when a queue bound is reached."""

    @abstractmethod
    def requeue(self, request: Request) -> None:
        """Queue a preempted request again; it must not lose its turn to requests that arrived later."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Drop a waiting request (aborted); no effect when it is not queued."""

    def released(self, request: Request) -> None:
        """The last hold of a waiting request was taken back: a scheduler that sets held requests aside looks at it
        again."""

    @abstractmethod
    def schedule(self, inputs: ScheduleInputs) -> StepPlan:
        """Make the plan of one step: ``planner.begin(inputs)``, then extend, admit, preempt, then
        ``planner.finish()``."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Requests queued here, held ones included."""

    def explain(self, request: Request) -> Wait | None:
        """Why ``request`` did not advance in the last step (None: it did, or it is not known here)."""
        return None

    def waits(self) -> StepWaits:
        """Why requests did not advance in the last step; asked once per step, so it must not look at every request."""
        return StepWaits()
