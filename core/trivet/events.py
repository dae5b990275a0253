"""What observers are told, and what a commit returns. Plain data; treat it as read-only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.plan import Ragged, StepPlan
    from trivet.result import Pooled, PromptLogprobs, StepResult, TokenLogprobs
    from trivet.state import Request


@dataclass(slots=True)
class Finished:
    """A request's end. ``num_output`` tokens were committed; ``reason`` is stop | length | abort | error."""

    request: Request
    reason: str
    stop_reason: int | str | None = None
    message: str | None = None
    num_output: int = 0


@dataclass(slots=True)
class CommitEvents:
    """What one commit changed. ``requests[i]`` got ``tokens.row(i)``; ends are in ``finished``."""

    step_id: int
    requests: list[Request] = field(default_factory=list)
    tokens: Ragged | None = None
    #: (index into ``requests``, values)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Request, PromptLogprobs]] = field(default_factory=list)
    pooled: list[tuple[Request, Pooled]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass(slots=True)
class RequestsAdded:
    """Accepted requests, oldest first."""

    requests: list[Request]


@dataclass(slots=True)
class RequestsFinished:
    """Ended requests."""

    finished: list[Finished]


@dataclass(slots=True)
class StepFinished:
    """``result`` is the workers' word, ``events`` what the commit made of it (rows that were stale or cut are left out;
    ``finished`` is filled later); ``seconds`` by leg: schedule, run, commit, and the worker's phases as it reported
    them."""

    plan: StepPlan
    result: StepResult
    events: CommitEvents
    seconds: dict[str, float]


@dataclass(slots=True)
class BlocksStored:
    """``hashes[i]`` names ``blocks[i]`` of KV group ``group``; ``detail`` is the cache plugin's own."""

    group: int
    blocks: list[int]
    hashes: list[bytes]
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class BlocksEvicted:
    """``cleared``: everything went at once and ``hashes`` is empty."""

    group: int
    hashes: list[bytes]
    cleared: bool = False
