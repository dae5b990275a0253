"""What an engine remembers: every step of every request has one reason, sums add up, and remembering costs nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import test_engine_machine as machine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from trivet.timeline import RUN


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ticking(Clock):
    """A second per look."""

    def __call__(self) -> float:
        self.now += 1
        return self.now


# ---------------------------------------------------------------------- sums


class Watched(machine.Life):
    """A life in which every step is judged for every request as it happens, by what their state is then."""

    size = 4096

    @initialize(size=st.sampled_from([1, 4, 30, 4096]))
    def choose(self, size: int) -> None:
        self.size = size

    def watch(self) -> None:
        history = self.engine.parts.lifecycle.history
        history.records = type(history.records)(maxlen=self.size)
        self.seen: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.tokens: Counter[str] = Counter()
        record, history._record = history._record, lambda *args: self.judge(record(*args), args[2])

    def judge(self, record: Any, plan: Any) -> Any:
        life, table = self.engine.parts.lifecycle, self.engine.table
        waits = self.engine.parts.scheduler.waits()
        planned = set() if plan is None else set(plan.slots.tolist())
        for name, request in life.requests.items():
            self.seen[name][self.reason(request, planned, waits)] += 1
        if plan is not None:
            for slot, count in zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True):
                self.tokens[table.requests[slot].request_id] += count
        return record

    def reason(self, request: Any, planned: set[int], waits: Any) -> str:
        if request.holds:
            return next(iter(request.holds.values())).kind
        if request.request_id in self.engine.parts.planner.step_holds:
            return "hold"
        if request.slot < 0:
            return "turn" if waits.queue is None else waits.queue.kind
        if request.slot in planned:
            return RUN
        if request.slot in waits.compute:
            return "compute"
        return "memory" if request.slot in waits.memory else RUN

    def one_step(self) -> None:
        if not hasattr(self, "seen"):
            self.watch()
        super().one_step()
        for wanted in self.all[-6:]:
            self.compare(wanted.request_id)

    def compare(self, name: str) -> None:
        timeline = self.engine.timeline(name)
        assert timeline is not None
        seen = self.seen[name]
        assert {kind: wait.steps for kind, wait in timeline.waits.items() if wait.steps} == {
            kind: count for kind, count in seen.items() if kind != RUN
        }
        assert timeline.steps_run == seen[RUN]
        assert timeline.steps == timeline.steps_run + timeline.steps_waited == sum(seen.values())
        assert timeline.tokens == self.tokens[name]
        told: Counter[str] = Counter()
        for span in timeline.spans:
            told[span.kind] += span.steps
            assert 0 < span.steps <= max(span.last_step - span.first_step + 1, 1) or timeline.steps_forgotten
        assert told == +seen
        if self.size > 4000 and not timeline.changes_left_out:
            assert timeline.steps_forgotten == 0
            assert sum(span.numbers["tokens"] for span in timeline.spans if span.kind == RUN) == timeline.tokens
        parts = timeline.seconds_run + sum(wait.seconds for wait in timeline.waits.values())
        assert parts == pytest.approx(timeline.seconds, abs=1e-4)
        assert timeline.changes[0].status == "queued"

    def finish(self) -> None:
        super().finish()
        for wanted in self.all:
            self.compare(wanted.request_id)
            timeline = self.engine.timeline(wanted.request_id)
            assert timeline is not None
            assert (timeline.status, timeline.finish_reason) == ("finished", wanted.request.finish_reason)
            assert timeline.changes[-1].status == "finished"


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Idle turns do not sleep, and the faults of random lives are not logged."""
    monkeypatch.setattr("trivet.worker.step_runner._PATIENCE", 0.0)
    monkeypatch.setattr("trivet.engine._IDLE_SECONDS", 0.0)
    import logging

    if "lives" in request.node.name:
        logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def lives(examples: int, steps: int, *, same: bool = False) -> None:
    run_state_machine_as_test(
        Watched,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=same,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


def test_in_short_lives_every_step_has_one_reason_and_all_add_up() -> None:
    lives(25, 30, same=True)


@pytest.mark.full
def test_in_long_lives_every_step_has_one_reason_and_all_add_up() -> None:
    lives(300, 60)
