"""What a request has lived through, as plain data: :class:`RequestTimeline`, made from its story and recent steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivet.roles.scheduler import WaitSpan

if TYPE_CHECKING:
    from trivet.history import StepRecord, Story

RUN = "run"  #: the kind of steps in which a request was computed, or was in flight
_NEAR = 8  # steps of another kind that a span bridges, so that rows that take turns do not make a span per step
_MAX_SPANS = 200


@dataclass(frozen=True, slots=True)
class StatusChange:
    """``step`` is the first one that it counted for, ``seconds`` are since the request's arrival."""

    step: int
    seconds: float
    #: queued, held, released, admitted, preempted, first token, finished
    status: str
    #: a hold's kind, ``run``, or empty while queued
    kind: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Waited:
    """Steps and seconds that a request waited for one kind of reason."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """The whole story of a request, unfinished or finished not long ago.

    ``steps_run`` and the steps of ``waits`` add up to ``steps``, whatever has been forgotten of single steps; ``spans``
    tell them one by one as far as the engine remembers."""

    request_id: str
    status: str  #: waiting, held, running, preempted or finished
    num_prompt: int
    num_output: int
    steps: int  #: of the engine since the request's arrival
    seconds: float  #: since the arrival, up to its end
    steps_run: int  #: in which it was computed or in flight
    seconds_run: float
    tokens: int  #: computed, over all steps; more than prompt and outputs after a preemption, or with drafts
    #: by kind: compute, memory, turn, hold (for one step), or the kind of a hold; complete
    waits: dict[str, Waited] = field(default_factory=dict)
    finish_reason: str | None = None
    message: str | None = None
    preemptions: int = 0
    cached_tokens: int = 0  #: found in the prefix cache at the first admission
    recomputed_tokens: int = 0
    seconds_to_first_token: float | None = None
    changes: tuple[StatusChange, ...] = ()
    changes_left_out: int = 0  #: in the middle of ``changes``
    #: running (``run``, with ``tokens`` in its numbers) and waiting, oldest first; spans that overlap took turns
    spans: tuple[WaitSpan, ...] = ()
    steps_forgotten: int = 0  #: earliest steps that are only in the sums and not in ``spans``

    @property
    def steps_waited(self) -> int:
        """Steps in which it did not advance."""
        return sum(wait.steps for wait in self.waits.values())


@dataclass(slots=True)
class _Open:
    """A span that may go on."""

    kind: str
    first: int
    last: int = 0
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def close(self) -> WaitSpan:
        numbers = {"tokens": self.tokens} if self.kind == RUN else dict(self.numbers)
        return WaitSpan(self.kind, self.first, self.last, self.steps, round(self.seconds, 6), self.detail, numbers)


def spans_of(story: Story, records: Sequence[StepRecord], now: float) -> list[WaitSpan]:
    """The steps of a request among ``records``, oldest first, as spans of one kind each."""
    changes = story.known_changes
    spans: list[_Open] = []
    near: dict[str, _Open] = {}
    at = -1
    for index in range(bisect_left(records, changes[0].step, key=lambda r: r.last_step), len(records)):
        record = records[index]
        if story.end_step is not None and record.step_id >= story.end_step:
            break
        while at + 1 < len(changes) and changes[at + 1].step <= record.last_step:
            at += 1
            near.clear()
        change = changes[at]
        until = records[index + 1].time if index + 1 < len(records) else now
        kind, detail, numbers, tokens = _reason(story, change, record)
        span = near.get(kind)
        if span is None or record.step_id - span.last > _NEAR:
            span = near[kind] = _Open(kind, record.step_id)
            spans.append(span)
        span.last, span.steps = record.last_step, span.steps + record.steps
        span.seconds += max(until - record.time, 0.0)
        span.tokens += tokens
        span.detail, span.numbers = detail, numbers
    return [span.close() for span in spans[-_MAX_SPANS:]]


def _reason(story: Story, change: Any, record: StepRecord) -> tuple[str, str, dict[str, Any], int]:
    """What a request did in a step: the kind, a detail, numbers, tokens computed."""
    name = story.request_id
    if change.kind and change.kind != RUN:
        return change.kind, change.detail, change.numbers, 0
    if name in record.holds:
        return "hold", record.holds[name], {}, 0
    if change.kind == RUN:
        if name in record.compute:
            detail = f"the step's token budget of {record.budget} went to others"
            return "compute", detail, {"token_budget": record.budget}, 0
        if name in record.memory:
            free, total = record.blocks or (0, 0)
            detail = f"{free} of {total} blocks are free, too few for its known tokens"
            return "memory", detail, {"free": free, "total": total}, 0
        return RUN, "", {}, record.tokens_of(change.epoch)
    wait = record.queue
    if wait is None:
        return "turn", "it had not been its turn yet", {}, 0
    return wait.kind, wait.detail, wait.numbers, 0


def forgotten(story: Story, spans: Iterable[WaitSpan], oldest: int) -> list[WaitSpan]:
    """What the sums have beyond ``spans``, as a span for each kind from the arrival to the step before ``oldest``."""
    left = {kind: list(pair) for kind, pair in story.sums.items()}
    for span in spans:
        pair = left.setdefault(span.kind, [0, 0.0])
        pair[0] -= span.steps
        pair[1] -= span.seconds
    first = story.arrival_step
    return [
        WaitSpan(kind, first, max(oldest - 1, first), int(steps), round(max(seconds, 0.0), 6))
        for kind, (steps, seconds) in left.items()
        if steps > 0
    ]
