"""What an engine remembers: every step of every request has one reason, sums add up, and remembering costs nothing."""

from __future__ import annotations

import gc
import json
import logging
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import machine_kit as kit
import pytest
import test_engine_machine as machine
from engine_kit import config, drain, engine, greedy
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from trivet.context import Hold
from trivet.engine import Engine
from trivet.hookspecs import hookimpl
from trivet.simulation import IdTokenizer, SimulatedExecutor, simple_layers
from trivet.testing import fakes
from trivet.timeline import RUN
from trivet_schemas.sampling import SamplingParams


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------------- sums


class Watched(machine.Life):
    """A life in which every step is judged for every request as it happens, by what their state is then."""

    size = 4096

    @rule(count=st.integers(2, 5), tokens=st.integers(10, 30), temperature=st.sampled_from([0, 1]))
    def add_growing(self, count: int, tokens: int, temperature: float) -> None:
        """Requests that are admitted together and do not fit together."""
        for i in range(count):
            prompt = [(17 * self.count + 3 * j) % 64 for j in range(1 + i % 3)]
            self.add(prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True))

    @initialize(size=st.sampled_from([1, 4, 30, 4096]))
    def choose(self, size: int) -> None:
        self.size = size

    def watch(self) -> None:
        history = self.engine.parts.lifecycle.history
        history.records = type(history.records)(maxlen=self.size)
        self.seen: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.tokens: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()
        record, history._record = history._record, lambda *args: self.judge(record(*args), args[2])

    def judge(self, record: Any, plan: Any) -> Any:
        life, table = self.engine.parts.lifecycle, self.engine.table
        waits = self.engine.parts.scheduler.waits()
        planned = set() if plan is None else set(plan.slots.tolist())
        for name, request in life.requests.items():
            self.seen[name][self.reason(request, planned, waits)] += 1
        self.preempted.update(record.preempted)
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
        if request.slot in waits.memory:
            return "memory"
        assert self.engine.table.in_flight[request.slot] > 0, f"{request.request_id} waits without a reason"
        return RUN

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
        request = next(wanted.request for wanted in self.all if wanted.request_id == name)
        assert timeline.preemptions == request.num_preemptions
        if not timeline.changes_left_out:
            entries = [change.status for change in timeline.changes if change.status in ("admitted", "preempted")]
            assert entries == (["admitted", "preempted"] * (request.num_preemptions + 1))[: len(entries)]
            assert entries.count("preempted") == request.num_preemptions

    def finish(self) -> None:
        super().finish()
        for wanted in self.all:
            self.compare(wanted.request_id)
            timeline = self.engine.timeline(wanted.request_id)
            assert timeline is not None
            assert (timeline.status, timeline.finish_reason) == ("finished", wanted.request.finish_reason)
            assert timeline.changes[-1].status == "finished"
            # The canary's step tells of whatever happened since the last one.
            assert self.preempted[wanted.request_id] == wanted.request.num_preemptions


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Idle turns do not sleep, and the faults of random lives are not logged."""
    monkeypatch.setattr("trivet.worker.step_runner._PATIENCE", 0.0)
    monkeypatch.setattr("trivet.engine._IDLE_SECONDS", 0.0)
    if "lives" in request.node.name:
        logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_in_short_lives_every_step_has_one_reason_and_all_add_up() -> None:
    kit.lives(Watched, 25, 30, same=True)


@pytest.mark.full
def test_in_long_lives_every_step_has_one_reason_and_all_add_up() -> None:
    kit.lives(Watched, 120, 50)


# ---------------------------------------------------------------------- what is told


def kinds(spans: Any) -> list[tuple[str, int]]:
    return [(span.kind, span.steps) for span in spans]


def test_a_wait_comes_with_its_history_in_steps_and_seconds() -> None:
    with engine(scheduler={"use": "continuous", "max_num_seqs": 1, "max_num_batched_tokens": 8}) as e:
        clock = Clock()
        e.parts.lifecycle.history.clock = clock
        e.add_request("a", [1] * 4, greedy(4))
        e.add_request("b", [2, 3], greedy(2))
        for _ in range(3):
            clock.now += 2.0
            e.step()
        wait = e.explain("b")
        assert wait is not None
        (span,) = wait.history
        assert (span.kind, span.first_step, span.last_step, span.steps, span.seconds) == ("turn", 1, 3, 3, 4.0)
        clock.now += 5
        assert [span.seconds for span in e.explain("b").history] == [9.0]  # type: ignore[union-attr]
        while e.explain("b") is not None:
            e.step()
        clock.now += 1
        timeline = e.timeline("b")
        assert timeline is not None
        assert kinds(timeline.spans) == [("turn", 4), (RUN, 1)]
        assert timeline.status == "running"
        drain(e)
        timeline = e.timeline("b")
        assert timeline is not None
        assert (timeline.status, timeline.finish_reason, timeline.num_output) == ("finished", "length", 2)
        assert [change.status for change in timeline.changes] == ["queued", "admitted", "first token", "finished"]
        assert (timeline.steps, timeline.steps_run, timeline.steps_waited) == (6, 2, 4)
        # 6 s to the third step, 5 s until the fourth, a second in which it ran.
        assert (timeline.seconds, timeline.waits["turn"].seconds, timeline.seconds_run) == (12.0, 11.0, 1.0)
        assert timeline.tokens == 3
        assert timeline.seconds_to_first_token in (11.0, 12.0)
        assert e.timeline("nobody") is None


def test_rows_without_tokens_or_blocks_say_so_while_they_hold_a_slot() -> None:
    scheduler = {"use": "continuous", "max_num_seqs": 4, "max_num_batched_tokens": 8}
    with engine(scheduler=scheduler, cache={"use": "paged", "block_size": 4, "num_blocks": 1 + 24}) as e:
        for i in range(4):
            e.add_request(str(i), [i + 1] * 24, greedy(50))
        done = drain(e, check=False)
        told = {i: e.timeline(i) for i in done}
        assert sum(t.preemptions for t in told.values()) == sum(r.num_preemptions for r in done.values()) > 0
        assert sum(t.recomputed_tokens for t in told.values()) > 0
        assert {kind for t in told.values() for kind in t.waits} >= {"memory", "compute"}
        rows = Counter(row["request_id"] for step in e.recent_steps() for row in step["rows"])
        for i, t in told.items():
            assert t.steps_run == rows[i], "one step at a time, so it runs when it is in the plan"
            statuses = [change.status for change in t.changes]
            assert statuses.count("preempted") == done[i].num_preemptions == statuses.count("admitted") - 1
            assert t.tokens >= 24 + 49 + t.recomputed_tokens - t.cached_tokens - 24


def test_running_rows_that_take_turns_wait_for_compute() -> None:
    class Narrow:
        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            if inputs.step_id > 1:
                inputs.token_budget = 1
            return (yield)

    with engine(Narrow()) as e:
        for name in ("a", "b"):
            e.add_request(name, [1, 2], greedy(5))
        drain(e)
        rows = Counter(row["request_id"] for step in e.recent_steps() for row in step["rows"])
        for name in ("a", "b"):
            timeline = e.timeline(name)
            assert timeline is not None
            assert timeline.steps_run == rows[name] == 5
        assert timeline.waits["compute"].steps == timeline.steps - 5 == 4
        span = next(span for span in timeline.spans if span.kind == "compute")
        assert (span.steps, span.detail) == (4, "the step's token budget of 1 went to others")
        assert span.numbers == {"token_budget": 1}


@pytest.mark.parametrize("size", [1, 3])
def test_steps_that_fell_out_of_the_ring_are_counted_by_kind(size: int) -> None:
    settings = config(scheduler={"use": "continuous", "max_num_seqs": 1, "max_num_batched_tokens": 8})
    e = Engine(settings | {"recent_steps": size}, [fakes])
    try:
        e.add_request("a", [1] * 4, greedy(10))
        e.add_request("b", [2, 3], greedy(9))
        drain(e)
        timeline = e.timeline("b")
        assert timeline is not None
        assert timeline.steps_forgotten == 19 - size
        assert kinds(timeline.spans) == [("turn", 10), (RUN, 9 - size), (RUN, size)]
        assert {kind: wait.steps for kind, wait in timeline.waits.items()} == {"turn": 10}
        assert len(e.recent_steps()) == size
    finally:
        e.shutdown()


def test_those_that_are_held_say_for_what_with_numbers() -> None:
    with engine(kit, grammar=[{"use": "parity"}], executor={"use": "held", "depth": 1}) as e:
        e.add_request("parent", [1, 2, 3, 4, 5], greedy(4))
        e.add_request("child", [1, 2, 3, 4, 5], greedy(4), parent="parent")
        constraint = {"regex": "alternating:5"}
        e.add_request("made", [7], SamplingParams(temperature=0, max_tokens=3, structured_outputs=constraint))
        wait = e.explain("child")
        assert wait is not None
        assert (wait.kind, wait.numbers["tokens"]) == ("hold", 5)
        assert wait.numbers["seconds"] >= 0
        assert "the prompt is being computed by parent (parent, for " in wait.detail
        e.step()
        seen = {wait.detail for name in ("made", "child") if (wait := e.explain(name)) is not None}
        drain(e)
        told = {name: e.timeline(name) for name in ("parent", "child", "made")}
        assert told["child"].waits["parent"].steps >= 1
        assert told["made"].waits["grammar"].steps >= 1 or any("grammar" in detail for detail in seen)
        span = next(span for span in told["child"].spans if span.kind == "parent")
        assert (span.numbers, span.detail) == ({"tokens": 5}, "the prompt is being computed by parent (core)")
        assert [c.status for c in told["child"].changes][:3] == ["queued", "held", "released"]


def test_a_prefix_and_a_transfer_are_told_with_their_tokens() -> None:
    scheduler = {"use": "continuous", "max_num_batched_tokens": 64, "long_prefill_token_threshold": 8}
    with engine(scheduler=scheduler) as e:
        for i in range(2):
            e.add_request(str(i), [*range(32), i], greedy(2))
        e.step()
        wait = e.explain("1")
        assert wait is not None
        assert wait.numbers["tokens"] == 32
        assert "will be shared" in wait.detail
        drain(e)
        timeline = e.timeline("1")
        assert timeline is not None
        assert timeline.waits["prefix"].steps >= 3
        assert timeline.cached_tokens == 32
    with engine(kit, connector={"use": "depot", "load": 1, "seed": 1}) as e:
        for i in range(12):
            e.add_request(str(i), [i, *range(32)], greedy(2))
        drain(e)
        told = [e.timeline(str(i)) for i in range(12)]
        loads = [span for t in told for span in t.spans if span.kind == "transfer"]
        assert loads
        assert all(span.numbers["tokens"] > 0 and "are being loaded through depot" in span.detail for span in loads)


def test_a_request_of_many_changes_keeps_its_sums() -> None:
    with engine() as e:
        e.add_request("a", [1, 2, 3], greedy(2))
        for _ in range(100):
            e.context.hold("a", Hold("x", "test", "waits", 0.0))
            e.step()
            e.context.release("a", "test", "x")
            e.context.hold("a", Hold("y", "test", "waits", 0.0))
            e.step()
            e.context.release("a", "test", "y")
        drain(e)
        timeline = e.timeline("a")
        assert timeline is not None
        assert (timeline.waits["x"].steps, timeline.waits["y"].steps, timeline.steps_run) == (100, 100, 2)
        assert len(timeline.changes) < 70
        assert timeline.changes_left_out > 100
        assert sum(steps for _, steps in kinds(timeline.spans)) == 202


def test_idle_turns_take_one_place_in_the_ring() -> None:
    with engine() as e:
        e.add_request("a", [1, 2, 3], greedy(2))
        e.step()
        e.context.hold("a", Hold("remote", "test", "waits", 0.0))
        for _ in range(500):
            e.step()
        steps = e.recent_steps()
        assert len(steps) == 2
        assert steps[-1]["steps"] == 500
        wait = e.explain("a")
        assert wait is not None
        assert kinds(wait.history) == [("remote", 500)]
        e.context.release("a", "test", "remote")
        drain(e)


def test_recent_steps_are_plain_data() -> None:
    with engine(scheduler={"use": "continuous", "max_num_seqs": 2, "max_num_batched_tokens": 16}) as e:
        for i in range(3):
            e.add_request(str(i), [i + 1] * 10, greedy(3))
        drain(e)
        steps = e.recent_steps()
        assert json.loads(json.dumps(steps)) == steps
        assert steps[0]["admitted"] == ["0", "1"]
        assert steps[0]["rows"] == [
            {"request_id": "0", "slot": 0, "tokens": 10},
            {"request_id": "1", "slot": 1, "tokens": 6},
        ]
        assert (steps[0]["tokens"], steps[0]["token_budget"], steps[0]["running"], steps[0]["waiting"]) == (
            16,
            16,
            2,
            1,
        )
        assert steps[0]["queue"]["kind"] in ("turn", "compute")
        assert set(steps[0]["seconds"]) == {"schedule", "run", "commit"}
        assert sum(step["accepted"] for step in steps) == 9
        assert sum(step["tokens"] for step in steps) == 3 * 12
        assert {name for step in steps for name in step["finished"]} <= {"0", "1", "2"}
        assert e.recent_steps(2) == steps[-2:]
        assert e.recent_steps(0) == []


def test_an_id_that_is_used_again_has_its_latest_story() -> None:
    with engine() as e:
        for count in (2, 5):
            e.add_request("a", [1, 2, 3], greedy(count))
            drain(e)
            timeline = e.timeline("a")
            assert timeline is not None
            assert timeline.num_output == count
        e.add_request("a", [1], greedy(1))
        assert e.timeline("a").status == "waiting"  # type: ignore[union-attr]
        drain(e)


# ---------------------------------------------------------------------- cost


def simulated(max_num_seqs: int) -> Engine:
    executor = SimulatedExecutor(simple_layers(2), vocab_size=100, max_model_len=4096, available_bytes=1 << 28)
    roles = {"cache": {"use": "paged"}, "scheduler": {"use": "continuous", "max_num_seqs": max_num_seqs}}
    return Engine({"model": "none", "plugins": roles}, [executor, IdTokenizer(100)])


def calls(function: Any) -> int:
    """Calls, of Python functions and of C's, that a function makes."""
    count = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # who watches collections (hypothesis does) is called in the midst of it
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_a_step_costs_the_same_however_many_requests_wait() -> None:
    counts = []
    for waiting in (1, 3000):
        e = simulated(4)
        e.parts.lifecycle.history.clock = Clock()
        for i in range(4 + waiting):
            e.add_request(str(i), [1, 2, 3], greedy(200))
        for _ in range(4):
            e.step()
        counts.append([calls(e.step) for _ in range(5)])
        e.shutdown()
    assert counts[0] == counts[1]


def test_nothing_grows_with_the_requests_that_came_and_went() -> None:
    e = simulated(64)
    history = e.parts.lifecycle.history
    requests: list[weakref.ref[Any]] = []
    for batch in range(30):
        added = [e.add_request(f"{batch}-{i}", [1, 2, 3], greedy(2)) for i in range(100)]
        requests += [weakref.ref(request) for request in added]
        drain(e, check=False)
    assert len(history._finished) == 1024
    assert not history._stories
    assert not history._names
    assert not history._late
    del added
    e.step()
    gc.collect()
    assert sum(ref() is not None for ref in requests) <= 1, "stories do not keep requests"
    assert e.timeline("0-0") is None
    assert e.timeline("29-99") is not None
    e.shutdown()
