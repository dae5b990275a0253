"""An engine that gets nowhere says why and ends; one that works for long does not."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit import config, drain, engine, greedy
from test_history import Clock

from trivet import AsyncEngine, EngineUnhealthyError, SamplingParams
from trivet.context import Hold
from trivet.engine import Engine
from trivet.hookspecs import hookimpl
from trivet.llm import LLM
from trivet.simulation import SimulatedExecutor, simple_layers
from trivet.testing import fakes
from trivet.watchdog import Monitor


@pytest.fixture(autouse=True)
def no_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.engine._IDLE_SECONDS", 0.0)


def still(e: Engine, clock: Clock, seconds: float, turns: int = 30) -> list[Any]:
    """Step while time passes; what ended."""
    ended = []
    for _ in range(turns):
        clock.now += seconds / turns
        ended += e.step().finished
    return ended


def virtual(e: Engine) -> Clock:
    clock = Clock()
    e.parts.lifecycle.history.clock = clock
    return clock


# ---------------------------------------------------------------------- nothing happens


def test_requests_that_nobody_releases_end_with_the_reasons(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "dump.json"
    e = Engine(config() | {"watchdog": {"seconds": 60, "dump": str(path)}}, [fakes])
    try:
        clock = virtual(e)
        e.add_request("a", [1, 2, 3], greedy(5))
        e.add_request("b", [4, 5], greedy(5))
        e.context.hold("a", Hold("remote", "router", "waits for the other side", time.monotonic(), {"tokens": 3}))
        e.context.hold("b", Hold("remote", "router", "waits for the other side", time.monotonic()))
        assert still(e, clock, 59) == []
        ended = still(e, clock, 4)
        assert [(end.request.request_id, end.reason) for end in ended] == [("a", "error"), ("b", "error")]
        assert "nothing has happened for 60 s" in ended[0].message
        assert "2 requests are held (a: waits for the other side" in ended[0].message
        assert e.fault == ended[0].message
        with pytest.raises(EngineUnhealthyError, match="waits for the other side"):
            e.add_request("c", [1], greedy(1))
        dump = json.loads(path.read_text(encoding="utf-8"))
        assert [request["request_id"] for request in dump["requests"]] == ["a", "b"]
        assert dump["requests"][0]["wait"]["numbers"]["tokens"] == 3
        assert dump["requests"][0]["waits"]["remote"]["steps"] > 10
        assert dump["steps"]
        assert dump["steps"][-1]["waiting"] == 2
        assert dump["stats"]["blocks"]["used"] == 0
        assert any("test_watchdog" in frame for frames in dump["threads"].values() for frame in frames)
        assert f"trivet explain {path}" in caplog.text
    finally:
        e.shutdown()


def test_without_a_file_the_dump_is_logged_in_short(caplog: Any) -> None:
    with engine() as e:
        clock = virtual(e)
        for i in range(50):
            e.add_request(str(i), [1, 2, 3], greedy(5))
            e.context.hold(str(i), Hold("remote", "router", "waits", time.monotonic()))
        assert len(still(e, clock, 400)) == 50
        text = caplog.records[-1].getMessage()
        dump = json.loads(text[text.index("; {") + 2 :])
        assert len(dump["requests"]) == 20
        assert dump["stats"]["requests"] == 50


def test_a_scheduler_is_asked_about_the_earliest_of_many_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """It may look at all that wait for each answer."""
    path = tmp_path / "dump.json"
    e = Engine(config() | {"watchdog": {"seconds": 60, "dump": str(path)}}, [fakes])
    try:
        clock = virtual(e)
        asked: list[str] = []
        scheduler: Any = e.parts.scheduler
        explain = scheduler.explain
        monkeypatch.setattr(scheduler, "explain", lambda request: asked.append(request.request_id) or explain(request))
        monkeypatch.setattr(scheduler, "_admit", lambda: None)
        for i in range(300):
            e.add_request(str(i), [1, 2, 3], greedy(5))
        ended = still(e, clock, 100)
        assert len(ended) == 300
        assert "100 requests are waiting for turn" in ended[0].message
        assert "and 200 more requests are unfinished" in ended[0].message
        assert sorted(set(asked), key=int) == [str(i) for i in range(100)]
        assert len(asked) == 200
        dump = json.loads(path.read_text(encoding="utf-8"))
        assert len(dump["requests"]) == 300
        assert dump["requests"][99]["wait"]["kind"] == "turn"
        assert dump["requests"][299]["waits"]["turn"]["steps"] > 0
    finally:
        e.shutdown()


def test_a_file_that_cannot_be_written_does_not_keep_the_engine_from_ending(caplog: Any) -> None:
    e = Engine(config() | {"watchdog": {"seconds": 1, "dump": "/nowhere/at/all/dump.json"}}, [fakes])
    try:
        clock = virtual(e)
        e.add_request("a", [1, 2, 3], greedy(5))
        e.context.hold("a", Hold("remote", "router", "waits", time.monotonic()))
        assert len(still(e, clock, 3)) == 1
        assert "its dump could not be made" in caplog.text
    finally:
        e.shutdown()


def test_whatever_happens_starts_the_time_anew() -> None:
    with engine() as e:
        clock = virtual(e)
        e.add_request("a", [1, 2, 3], greedy(40))
        e.context.hold("a", Hold("x", "test", "waits", time.monotonic()))
        still(e, clock, 290)
        e.add_request("b", [1], greedy(1))  # comes and goes
        still(e, clock, 290)
        e.context.release("a", "test", "x")
        e.context.hold("a", Hold("y", "test", "waits again", time.monotonic()))
        still(e, clock, 290)
        e.context.release("a", "test", "y")
        clock.now += 290
        e.step()
        clock.now += 290  # every step takes as long, and works
        for _ in range(5):
            clock.now += 1000
            e.step()
        assert e.fault is None
        drain(e)


@pytest.mark.parametrize("what", ["token_budget", "max_num_seqs"])
def test_a_paused_engine_does_as_it_was_told(what: str) -> None:
    class Pause:
        on = False

        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            if self.on:
                setattr(inputs, what, 0)
            return (yield)

    pause = Pause()
    with engine(pause) as e:
        clock = virtual(e)
        if what == "token_budget":
            e.add_request("a", [1, 2, 3], greedy(4))
            e.step()
        pause.on = True
        if what == "max_num_seqs":
            e.add_request("a", [1, 2, 3], greedy(4))
        still(e, clock, 3600)
        pause.on = False
        assert len(drain(e)["a"].output_ids) == 4


def test_a_process_that_was_stopped_has_not_stood_still() -> None:
    with engine() as e:
        clock = virtual(e)
        e.add_request("a", [1, 2, 3], greedy(4))
        e.context.hold("a", Hold("x", "test", "waits", time.monotonic()))
        still(e, clock, 100)
        clock.now += 86400
        assert e.step().finished == []
        assert e.fault is None


def test_an_engine_may_wait_for_ever() -> None:
    e = Engine(config() | {"watchdog": {"seconds": None}}, [fakes])
    try:
        clock = virtual(e)
        e.add_request("a", [1, 2, 3], greedy(4))
        e.context.hold("a", Hold("x", "test", "waits", time.monotonic()))
        still(e, clock, 1e9)
        assert e.fault is None
    finally:
        e.shutdown()


# ---------------------------------------------------------------------- a step hangs


class Hanging(SimulatedExecutor):
    """A step whose result does not come before it is let go."""

    def __init__(self, after: int) -> None:
        super().__init__(simple_layers(2), vocab_size=64, max_model_len=96, available_bytes=1 << 24)
        self.after, self.hangs, self.go = after, threading.Event(), threading.Event()

    def submit(self, plan: Any) -> Any:
        pending = super().submit(plan)
        self.after -= 1
        if self.after < 0:
            self.hangs.set()
            pending.result, result = lambda: self.go.wait(20) and result(), pending.result
        return pending


def hanging(after: int, seconds: float | None) -> tuple[Hanging, Engine]:
    executor = Hanging(after)
    settings = {
        "model": "none",
        "watchdog": {"seconds": seconds},
        "plugins": {"cache": {"use": "paged"}, "tokenizer": {"use": "fake"}},
    }
    return executor, Engine(settings, [fakes, executor])


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("looks", [1, 50])
def test_a_monitor_waits_longer_for_the_first_step(looks: int, quiet: None) -> None:
    for after, limit in ((0, 1200), (3, 300)):
        executor, e = hanging(after, None)  # no thread: the test looks
        e.watchdog.seconds = 300
        told: list[str] = []
        monitor = Monitor(e, told.append)
        monitor.stop()
        e.add_request("a", [1, 2, 3], greedy(40))
        thread = threading.Thread(target=lambda e=e: [e.step() for _ in range(6)])
        thread.start()
        assert executor.hangs.wait(10)
        assert monitor.look(1e6), "the first look at a step only notes it"
        for _ in range(looks):
            assert monitor.look((limit - 1) / looks)
        assert e.fault is None
        assert not monitor.look(2)
        assert told == [e.fault]
        assert "has not returned for" in told[0]
        executor.go.set()
        thread.join()
        assert e.parts.lifecycle.requests == {}, "once the step is back, its engine ends what it has"
        e.shutdown()


def test_a_step_between_two_looks_and_an_idle_engine_are_no_concern() -> None:
    with engine() as e:
        told: list[str] = []
        monitor = Monitor(e, told.append)
        monitor.stop()
        e.add_request("a", [1, 2, 3], greedy(5))
        for _ in range(20):
            assert monitor.look(1000)
            e.step()
        assert told == []


def test_a_monitor_does_not_keep_an_engine() -> None:
    import gc

    executor, e = hanging(99, None)
    monitor = Monitor(e, print)
    e.shutdown()
    del e, executor
    gc.collect()
    assert not monitor.look(1)


@pytest.mark.asyncio
async def test_the_streams_of_a_hanging_engine_end_with_the_reason(quiet: None, monkeypatch: Any) -> None:
    monkeypatch.setattr("trivet.engine_thread._HUNG_SECONDS", 0.05)
    executor, made = hanging(3, 0.2)
    served = AsyncEngine.from_engine(made)
    await served.start()
    stream = served.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=50, output_kind="delta"))
    outputs = [output async for output in stream]
    assert "a worker hangs" in (outputs[-1].error or "")
    assert outputs[-1].outputs[0].finish_reason == "error"
    assert not served.is_running
    with pytest.raises(EngineUnhealthyError, match="a worker hangs"):
        await served.check_health()
    with pytest.raises(EngineUnhealthyError, match="a worker hangs"):
        await anext(served.generate({"prompt_token_ids": [1]}))
    await asyncio.wait_for(served.shutdown(), 5)
    executor.go.set()
    await asyncio.to_thread(served._thread._thread.join, 10)  # type: ignore[union-attr]
    assert made.parts.lifecycle.requests == {}


@pytest.mark.asyncio
async def test_calls_that_wait_for_a_hanging_engine_fail(quiet: None) -> None:
    executor, made = hanging(0, 0.1)
    served = AsyncEngine.from_engine(made)
    await served.start()
    stream = served.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=5))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.to_thread(executor.hangs.wait, 10)
    with pytest.raises(EngineUnhealthyError, match="a worker hangs"):
        await served.explain("whatever")
    assert "a worker hangs" in ((await first).error or "")
    executor.go.set()
    await served.shutdown()


def test_a_hanging_llm_is_unhealthy_once_it_is_back(caplog: Any) -> None:
    executor, made = hanging(2, 0.1)
    with LLM.from_engine(made) as llm:

        def let_go() -> None:
            while made.fault is None:
                time.sleep(0.005)
            executor.go.set()

        threading.Thread(target=let_go).start()
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=50), use_tqdm=False)
        assert "a worker hangs" in (output.error or "")
        assert sum("the engine gives up" in record.getMessage() for record in caplog.records) == 1
        with pytest.raises(EngineUnhealthyError, match="a worker hangs"):
            llm.generate([[1]], use_tqdm=False)
