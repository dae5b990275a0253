"""What the last steps did and why requests waited, at a cost per step that does not grow with those that wait.

Two records are kept. A ring of :class:`StepRecord` has the last steps with their arrays and reasons. Beside it, sums
that are never forgotten: the engine counts steps, and for the queue steps by reason; a request's *story* takes the
difference between the counts when its status changes. Only rows with a reason of their own (no token budget, no
blocks, held for one step) are touched one by one."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.plan import EMPTY_I32, EMPTY_I64, Int32, Int64
from trivet.timeline import RUN, RequestTimeline, StatusChange, Waited, forgotten, spans_of

if TYPE_CHECKING:
    from trivet.events import CommitEvents
    from trivet.plan import StepPlan
    from trivet.roles import Cache, ScheduleInputs, Scheduler, Wait, WaitSpan
    from trivet.state import Request, RequestTable

_FIRST_CHANGES, _LAST_CHANGES = 8, 56  # status changes of a request that are kept
_FINISHED, _LEFT = 1024, 8192  # stories kept after the end; admissions whose request is still known by name
_BLOCKS_SECONDS = 0.1  # counting blocks takes time by their number, so it is done now and then


@dataclass(slots=True)
class StepRecord:
    """One step; or several turns in a row without a plan, in which nothing changed (``steps`` > 1).

    ``slots``, ``epochs`` and ``num_scheduled`` are the plan's own ``[R]`` arrays; ``time`` is monotonic seconds when
    the plan was made; ``seconds`` are by leg (schedule, run, commit), complete once it is committed."""

    step_id: int
    time: float
    budget: int
    steps: int = 1
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    accepted: int = 0  #: tokens that its commit appended to outputs
    slots: Int32 = field(default_factory=lambda: EMPTY_I32)
    epochs: Int64 = field(default_factory=lambda: EMPTY_I64)
    num_scheduled: Int32 = field(default_factory=lambda: EMPTY_I32)
    admitted: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()  #: since the step before
    num_running: int = 0
    num_waiting: int = 0
    blocks: tuple[int, int] | None = None  #: free and all, where they were counted
    queue: Wait | None = None
    compute: frozenset[str] = frozenset()
    memory: frozenset[str] = frozenset()
    holds: Mapping[str, str] = field(default_factory=dict)  #: for this step alone, by request

    @property
    def last_step(self) -> int:
        """The last of its steps."""
        return self.step_id + self.steps - 1

    def tokens_of(self, epoch: int) -> int:
        """Tokens that were computed for an admission."""
        row = (self.epochs == epoch).nonzero()[0]
        return int(self.num_scheduled[row[0]]) if len(row) else 0


@dataclass(frozen=True, slots=True)
class _Change:
    """A status change as it is kept; see :class:`trivet.timeline.StatusChange`."""

    step: int
    time: float
    status: str
    kind: str
    detail: str
    numbers: dict[str, Any]
    epoch: int


@dataclass(slots=True, eq=False)
class Story:
    """What is kept of a request. ``kind`` is what it does now: ``run``, a hold's kind, or empty while it is queued."""

    request: Request | None
    request_id: str
    arrival_step: int
    arrival: float
    kind: str = ""
    #: by kind: steps and seconds, up to the last change; kinds that single steps took something from may be negative
    sums: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    slot: int = -1
    epoch: int = -1
    steps_mark: int = 0
    time_mark: float = 0.0
    queue_mark: dict[str, tuple[int, float]] = field(default_factory=dict)
    tokens_mark: int = 0
    late: str = ""  #: the reason of its own that it has in the last step
    late_since: float = 0.0
    first: list[_Change] = field(default_factory=list)
    last: deque[_Change] = field(default_factory=lambda: deque(maxlen=_LAST_CHANGES))
    num_changes: int = 0
    first_token: tuple[int, float] | None = None
    end_step: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def known_changes(self) -> list[_Change]:
        """Changes without a gap, up to the last."""
        gap = self.num_changes > len(self.first) + len(self.last)
        return list(self.last) if gap else [*self.first, *self.last]

    def note(self, change: _Change) -> None:
        """Keep a change, for a while."""
        self.num_changes += 1
        (self.first if len(self.first) < _FIRST_CHANGES else self.last).append(change)

    def count(self, kind: str, steps: float, seconds: float) -> None:
        """Add to the sums."""
        pair = self.sums.setdefault(kind, [0, 0.0])
        pair[0] += steps
        pair[1] += seconds


class StepHistory:
    """Owned by :class:`trivet.lifecycle.Lifecycle`; belongs to the engine's thread."""

    def __init__(self, table: RequestTable, scheduler: Scheduler, cache: Cache, size: int = 1024) -> None:
        self._table, self._scheduler, self._cache = table, scheduler, cache
        #: monotonic seconds
        self.clock: Callable[[], float] = time.monotonic
        self.records: deque[StepRecord] = deque(maxlen=size)
        #: grows with every token computed, request that comes or goes, hold that is released, transfer that ends
        self.progress = 0
        self.num_committed = 0  #: steps
        self.step = 1  #: the step that a status change counts from
        self._open: deque[StepRecord] = deque()  # sent, not committed
        self._stories: dict[Request, Story] = {}
        self._names: dict[str, Story] = {}
        self._finished: OrderedDict[str, Story] = OrderedDict()
        self._left: OrderedDict[int, str] = OrderedDict()
        self._steps = 0
        self._queue: dict[str, tuple[int, float]] = {}  # by kind: steps and seconds that the queue has waited
        self._queue_kind, self._queue_since = "turn", self.clock()
        self._tokens: Int64 = np.zeros(table.max_num_seqs, np.int64)
        self._late: list[Story] = []
        self._changed = True  # since the last record
        self._admitted: list[str] = []
        self._preempted: list[str] = []
        self._ended: list[str] = []
        self._blocks_time = -1e9

    # ------------------------------------------------------------------ requests

    def added(self, request: Request) -> None:
        """A request was accepted."""
        now = self.clock()
        story = Story(request, request.request_id, self.step, now)
        self._stories[request] = self._names[request.request_id] = story
        self._begin(story, "", now)
        story.note(_Change(self.step, now, "queued", "", "", {}, -1))
        self._moved()

    def changed(self, request: Request, status: str) -> None:
        """A request's holds or slot are others than before; ``status`` says why."""
        story = self._stories.get(request)
        if story is None:
            return
        hold = next(iter(request.holds.values()), None)
        kind = hold.kind if hold is not None else RUN if request.slot >= 0 else ""
        if status == "admitted":
            story.epoch = request.epoch
            self._admitted.append(request.request_id)
        elif status == "preempted":
            self._leave(story)
            self._preempted.append(request.request_id)
        if kind == story.kind and status in ("held", "released"):
            return
        now = self.clock()
        if kind != story.kind:
            self._end(story, now)
            self._begin(story, kind, now)
        if status == "admitted":
            story.slot, story.tokens_mark = request.slot, int(self._tokens[request.slot])
        detail = f"{hold.detail} ({hold.plugin})" if hold is not None else ""
        numbers = dict(hold.numbers) if hold is not None else {}
        story.note(_Change(self.step, now, status, kind, detail, numbers, story.epoch))
        self._changed = True
        if status == "released":
            self.progress += 1

    def first_token(self, request: Request, step_id: int) -> None:
        """The first output of a request was committed."""
        story = self._stories.get(request)
        if story is not None:
            story.first_token = (step_id, self.clock())

    def ended(self, request: Request) -> None:
        """A request has ended."""
        story = self._stories.pop(request, None)
        if story is None:
            return
        now = self.clock()
        self._end(story, now)
        self._leave(story)
        story.facts, story.end_step = _facts(request, self._table), self.step
        story.time_mark = now
        story.note(_Change(self.step, now, "finished", "", request.message or "", {}, -1))
        story.request = None
        if self._names.get(request.request_id) is story:
            del self._names[request.request_id]
        self._finished.pop(request.request_id, None)
        self._finished[request.request_id] = story
        if len(self._finished) > _FINISHED:
            self._finished.popitem(last=False)
        self._ended.append(request.request_id)
        self._moved()

    def _moved(self) -> None:
        self.progress += 1
        self._changed = True

    def _leave(self, story: Story) -> None:
        if story.slot >= 0:
            story.tokens += int(self._tokens[story.slot]) - story.tokens_mark
            self._left[story.epoch] = story.request_id
            if len(self._left) > _LEFT:
                self._left.popitem(last=False)
        story.slot = -1

    def _begin(self, story: Story, kind: str, now: float) -> None:
        story.kind, story.steps_mark, story.time_mark = kind, self._steps, now
        if not kind:
            self._tick(now)
            story.queue_mark = self._queue.copy()

    def _end(self, story: Story, now: float) -> None:
        """Take the steps and seconds since the mark into the sums."""
        self._settle(story, now)
        story.late = ""
        if story.kind:
            story.count(story.kind, self._steps - story.steps_mark, now - story.time_mark)
            return
        self._tick(now)
        for kind, (steps, seconds) in self._queue.items():
            before = story.queue_mark.get(kind, (0, 0.0))
            if (steps, seconds) != before:
                story.count(kind, steps - before[0], seconds - before[1])

    def _tick(self, now: float) -> None:
        steps, seconds = self._queue.get(self._queue_kind, (0, 0.0))
        self._queue[self._queue_kind] = steps, seconds + now - self._queue_since
        self._queue_since = now

    def _settle(self, story: Story, now: float) -> None:
        if story.late:
            story.count(story.late, 0, now - story.late_since)
            story.count(story.kind or self._queue_kind, 0, story.late_since - now)
            story.late_since = now

    # ------------------------------------------------------------------ steps

    def sent(self, plan: StepPlan, inputs: ScheduleInputs, holds: Mapping[str, str], seconds: float) -> None:
        """The plan of the step is going to the workers."""
        record = self._record(inputs, holds, plan)
        record.seconds = {"schedule": seconds}
        self._open.append(record)
        if len(plan.slots):
            self._tokens[plan.slots] += plan.num_scheduled
            self.progress += 1
        self.step = plan.step_id + 1

    def unsent(self, inputs: ScheduleInputs, holds: Mapping[str, str], *, busy: bool) -> None:
        """There was nothing to send. It counts as a step if requests wait although nothing is in flight (``busy``)."""
        if self._stories and not busy:
            self._idle(inputs, holds)
        if inputs.token_budget == 0 or inputs.max_num_seqs <= 0:
            self.progress += 1  # somebody pauses the engine: it does as it was told
        self.step = inputs.step_id + 1

    def _idle(self, inputs: ScheduleInputs, holds: Mapping[str, str]) -> None:
        last = self.records[-1] if self.records else None
        self._record(inputs, holds, None)
        if last is not None and not last.seconds and not self._changed:
            new = self.records[-1]
            same = last.compute == new.compute and last.memory == new.memory and last.holds.keys() == new.holds.keys()
            kinds = [None if r.queue is None else r.queue.kind for r in (last, new)]
            if same and kinds[0] == kinds[1] and last.last_step + 1 == new.step_id:
                self.records.pop()
                last.steps, last.queue = last.steps + 1, new.queue
        self._changed = False

    def committed(self, plan: StepPlan, events: CommitEvents, seconds: dict[str, float]) -> None:
        """A step's result was taken over."""
        opened = self._open
        while opened and opened[0].step_id < plan.step_id:
            opened.popleft()  # it failed
        if opened and opened[0].step_id == plan.step_id:
            record = opened.popleft()
            record.seconds = seconds
            record.accepted = 0 if events.tokens is None else len(events.tokens.values)
        self.num_committed += 1
        self.progress += len(plan.slots) > 0

    def _record(self, inputs: ScheduleInputs, holds: Mapping[str, str], plan: StepPlan | None) -> StepRecord:
        now = self.clock()
        waits = self._scheduler.waits()
        # Seconds since the step before belong to what was found then.
        self._tick(now)
        for story in self._late:
            self._settle(story, now)
            story.late = ""
        self._late.clear()
        self._steps += 1
        kind = "turn" if waits.queue is None else waits.queue.kind
        steps, seconds = self._queue.get(kind, (0, 0.0))
        self._queue[kind], self._queue_kind = (steps + 1, seconds), kind
        record = StepRecord(inputs.step_id, now, inputs.token_budget, queue=waits.queue, holds=holds)
        if plan is not None:
            record.slots, record.epochs, record.num_scheduled = plan.slots, plan.epochs, plan.num_scheduled
            record.tokens = plan.num_tokens
            self._changed = True
        if self._admitted or self._preempted or self._ended:
            record.admitted, record.preempted = tuple(self._admitted), tuple(self._preempted)
            record.finished = tuple(self._ended)
            self._admitted, self._preempted, self._ended = [], [], []
        record.num_running, record.num_waiting = self._table.num_running, self._scheduler.num_waiting
        for request_id in holds:
            held = self._names.get(request_id)
            if held is not None and held.kind in ("", RUN):
                self._is_late(held, "hold", now)
        if waits.compute or waits.memory:
            planned = frozenset(record.slots.tolist())
            record.compute = self._are_late(waits.compute - planned, "compute", now)
            record.memory = self._are_late(waits.memory - planned, "memory", now)
        if record.memory or now - self._blocks_time > _BLOCKS_SECONDS:
            stats = self._cache.stats()
            record.blocks, self._blocks_time = (stats.free, stats.total), now
        self.records.append(record)
        return record

    def _are_late(self, slots: frozenset[int], kind: str, now: float) -> frozenset[str]:
        found = []
        for slot in slots:
            request = self._table.requests[slot]
            story = None if request is None else self._stories.get(request)
            if story is not None and story.kind == RUN and not story.late:
                self._is_late(story, kind, now)
                found.append(story.request_id)
        return frozenset(found)

    def _is_late(self, story: Story, kind: str, now: float) -> None:
        story.late, story.late_since = kind, now
        story.count(kind, 1, 0.0)
        story.count(story.kind or self._queue_kind, -1, 0.0)
        self._late.append(story)

    # ------------------------------------------------------------------ what is told

    def waits(self, request_id: str) -> tuple[WaitSpan, ...]:
        """When and why an unfinished request waited so far, oldest first; steps long past in one span per kind."""
        story = self._names.get(request_id)
        if story is None:
            return ()
        old, new = self._spans(story)
        return tuple(span for span in (*old, *new) if span.kind != RUN)

    def timeline(self, request_id: str, *, spans: bool = True) -> RequestTimeline | None:
        """The story of a request, see :meth:`trivet.Engine.timeline`."""
        story = self._names.get(request_id) or self._finished.get(request_id)
        if story is None:
            return None
        old, new = self._spans(story) if spans else ([], [])
        now = self._refresh(story)
        facts = story.facts if story.request is None else _facts(story.request, self._table)
        sums = {kind: Waited(int(steps), seconds) for kind, (steps, seconds) in story.sums.items()}
        run = sums.pop(RUN, Waited(0, 0.0))
        tokens = story.tokens
        if story.slot >= 0:
            tokens += int(self._tokens[story.slot]) - story.tokens_mark
        steps = run.steps + sum(wait.steps for wait in sums.values())
        changes = [
            StatusChange(c.step, round(c.time - story.arrival, 6), c.status, c.kind, c.detail)
            for c in (*story.first, *story.last)
        ]
        first = story.first_token
        if first is not None:
            at = sum(change.seconds <= first[1] - story.arrival for change in changes)
            at = min(at, len(changes) - (story.request is None))
            changes.insert(at, StatusChange(first[0], round(first[1] - story.arrival, 6), "first token", RUN))
        return RequestTimeline(
            request_id,
            steps=steps,
            seconds=round(now - story.arrival, 6),
            steps_run=run.steps,
            seconds_run=round(run.seconds, 6),
            tokens=tokens,
            waits={k: Waited(w.steps, round(w.seconds, 6)) for k, w in sums.items() if w.steps or w.seconds > 1e-9},
            seconds_to_first_token=None if first is None else round(first[1] - story.arrival, 6),
            changes=tuple(changes),
            changes_left_out=story.num_changes - len(story.first) - len(story.last),
            spans=(*old, *new),
            steps_forgotten=steps - sum(span.steps for span in new),
            **facts,
        )

    def _spans(self, story: Story) -> tuple[list[WaitSpan], list[WaitSpan]]:
        """What has been forgotten of single steps, by kind; and the rest."""
        now = self._refresh(story)
        spans = spans_of(story, list(self.records), now)
        oldest = self.records[0].step_id if self.records else story.arrival_step
        return forgotten(story, spans, oldest), spans

    def _refresh(self, story: Story) -> float:
        """Bring the sums of a story up to date; returns the time of that."""
        if story.request is None:
            return story.time_mark
        now = self.clock()
        late = story.late
        self._end(story, now)
        self._begin(story, story.kind, now)
        story.late, story.late_since = late, now
        return now

    def name_of(self, slot: int, epoch: int) -> str | None:
        """The request of an admission, if it is known still."""
        request = self._table.requests[slot]
        if request is not None and request.epoch == epoch:
            return request.request_id
        return self._left.get(epoch)

    def recent(self, count: int | None = None) -> list[dict[str, Any]]:
        """See :meth:`trivet.Engine.recent_steps`."""
        records = list(self.records)
        return [self._plain(record) for record in (records if count is None else records[-count:] if count else [])]

    def _plain(self, record: StepRecord) -> dict[str, Any]:
        queue = record.queue
        rows = zip(record.slots.tolist(), record.epochs.tolist(), record.num_scheduled.tolist(), strict=True)
        return {
            "step_id": record.step_id,
            "steps": record.steps,
            "time": record.time,
            "seconds": {leg: round(seconds, 6) for leg, seconds in record.seconds.items()},
            "tokens": record.tokens,
            "token_budget": record.budget,
            "accepted": record.accepted,
            "rows": [
                {"request_id": self.name_of(slot, epoch), "slot": slot, "tokens": tokens}
                for slot, epoch, tokens in rows
            ],
            "admitted": list(record.admitted),
            "preempted": list(record.preempted),
            "finished": list(record.finished),
            "running": record.num_running,
            "waiting": record.num_waiting,
            "blocks": None if record.blocks is None else {"free": record.blocks[0], "total": record.blocks[1]},
            "queue": None
            if queue is None
            else {"kind": queue.kind, "detail": queue.detail, "numbers": dict(queue.numbers)},
            "compute": sorted(record.compute),
            "memory": sorted(record.memory),
            "holds": dict(record.holds),
        }


def _facts(request: Request, table: RequestTable) -> dict[str, Any]:
    return {
        "status": request.status.name.lower(),
        "num_prompt": request.num_prompt,
        "num_output": table.num_output(request),
        "finish_reason": request.finish_reason,
        "message": request.message,
        "preemptions": request.num_preemptions,
        "cached_tokens": max(request.num_cached_tokens, 0),
        "recomputed_tokens": request.num_recomputed_tokens,
    }
