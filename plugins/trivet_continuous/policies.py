"""The scheduling policies of the continuous scheduler: who of those that wait is next."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from trivet.errors import RequestError
from trivet.policies import SchedulingPolicy, detail_place, request_detail
from trivet.state import Request
from trivet_schemas.errors import show
from trivet_schemas.options import Options

_Positive = Annotated[float, Field(gt=0)]


class Fcfs(SchedulingPolicy):
    """First come, first served; a preempted request keeps its place."""

    def key(self, request: Request) -> Any:
        """The same for all."""
        return 0


class PriorityOptions(Options):
    """Options of the policy ``priority``."""

    preemption: bool = False
    """Whether a waiting request takes slot and blocks of running ones that are less urgent."""


class Priority(SchedulingPolicy):
    """The least `priority` first, then by arrival. Others wait for as long as more urgent ones come."""

    options_model = PriorityOptions
    orders_running = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.preempts = self.options.preemption

    def key(self, request: Request) -> Any:
        """The request's priority."""
        return request.priority


class ShortestOptions(Options):
    """Options of the policy ``shortest_first``."""

    ageing: _Positive = 100.0
    """How many tokens longer a request may be for each second that it came earlier, and still go first."""
    measure: Literal["prompt", "total"] = "prompt"
    """What counts as length: the prompt, or the prompt and the most that may be generated."""


class ShortestFirst(SchedulingPolicy):
    """Short requests first, with ageing, so that long ones get their turn too.

    ``length - ageing * waiting`` changes for all requests alike, so ``length + ageing * arrival`` has the same order
    and never changes. A preempted request goes before all that never ran."""

    options_model = ShortestOptions

    def key(self, request: Request) -> Any:
        """Length and arrival in one number of tokens."""
        length = request.max_total if self.options.measure == "total" else request.num_prompt
        return request.num_preemptions == 0, length + self.options.ageing * request.arrival_time


class DeadlineOptions(Options):
    """Options of the policy ``deadline``."""

    default: _Positive | None = None
    """Seconds after its arrival that a request is due which names no `deadline`; by default it goes after all that
    do."""
    preemption: bool = False
    """Whether a waiting request takes slot and blocks of running ones that are due later."""


class Deadline(SchedulingPolicy):
    """Earliest deadline first (Liu and Layland 1973). A request names the seconds from its arrival as `deadline` in
    ``extra`` or in ``extra_args`` of its parameters."""

    options_model = DeadlineOptions
    orders_running = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.preempts = self.options.preemption

    def validate(self, request: Request) -> None:
        """Refuse what is no number of seconds."""
        self._seconds(request)

    def key(self, request: Request) -> Any:
        """When the request is due."""
        return request.arrival_time + self._seconds(request)

    def _seconds(self, request: Request) -> float:
        given = request_detail(request, "deadline")
        if given is None:
            default: float | None = self.options.default
            return math.inf if default is None else default
        try:
            seconds = math.nan if isinstance(given, bool) else float(given)
        except (TypeError, ValueError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            where = detail_place(request, "deadline")
            raise RequestError(f"{where}: must be a number of seconds above 0, got {show(given)}", param=where)
        return seconds
