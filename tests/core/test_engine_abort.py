"""A plugin of the engine's side ends requests: ``EngineContext.abort``."""

from __future__ import annotations

import time
from typing import Any

import machine_kit as kit
import pytest
from engine_kit import check_free, config, drain, engine, expect, greedy, prompts

from trivet.context import Hold
from trivet.hookspecs import hookimpl
from trivet.registry import Registry
from trivet.testing import fakes
from trivet_schemas.config import EngineConfig

WORK = {str(i): (p, 12) for i, p in enumerate(prompts(6, seed=4))}


def submit(e: Any) -> None:
    for request_id, (prompt, count) in WORK.items():
        e.add_request(request_id, prompt, greedy(count))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_scheduler_ends_waiting_and_running_requests_while_it_makes_a_plan(depth: int) -> None:
    refuse: list[str] = []
    scheduler = {"use": "continuous", "max_num_batched_tokens": 32, "max_num_seqs": 2}
    with engine(kit, scheduler=scheduler, executor={"use": "held", "depth": depth}) as e:

        def begin(inputs: Any, begin: Any = e.parts.planner.begin) -> None:
            begin(inputs)
            while refuse:
                e.context.abort(refuse.pop(), "its deadline has passed")

        e.parts.planner.begin = begin  # type: ignore[method-assign]
        submit(e)
        for _ in range(4):
            e.step()
            e.check_integrity()
        running = next(r for r in e.parts.lifecycle.requests.values() if r.slot >= 0).request_id
        waiting = next(r for r in e.parts.lifecycle.requests.values() if r.slot < 0).request_id
        refuse += [waiting, running, "unknown"]
        done = drain(e)
        for request_id in (waiting, running):
            assert (done[request_id].finish_reason, done[request_id].message) == ("error", "its deadline has passed")
        expect(done, {i: w for i, w in WORK.items() if i not in (waiting, running)})
        assert e.fault is None
        check_free(e)


def test_a_request_that_is_ended_between_steps_keeps_what_it_has() -> None:
    with engine() as e:
        e.add_request("a", [1, 2, 3], greedy(20))
        e.add_request("b", [4, 5], greedy(5))
        for _ in range(3):
            e.step()
        e.context.abort("a", "enough", reason="abort")
        done = drain(e)
        assert (done["a"].finish_reason, done["a"].message, len(done["a"].output_ids)) == ("abort", "enough", 3)
        assert len(done["b"].output_ids) == 5
        e.context.abort("a", "again")
        assert not e.has_work
        check_free(e)


def test_a_held_request_ends_at_once_and_an_idle_engine_reports_it() -> None:
    with engine() as e:
        e.add_request("a", [1, 2, 3], greedy(20))
        e.context.hold("a", Hold("remote", "router", "waits for its turn", time.monotonic()))
        assert e.step().finished == []
        e.context.abort("a", "the remote side is gone")
        (end,) = e.step().finished
        assert (end.reason, end.message) == ("error", "the remote side is gone")
        assert not e.has_work


@pytest.mark.parametrize("leg", ["schedule", "run", "commit"])
def test_a_wrapper_of_any_leg_may_end_any_request(leg: str) -> None:
    class Ending:
        ids = ["0", "5"]

        def end(self) -> None:
            while self.ids and e.parts.table.num_running:
                e.context.abort(self.ids.pop(), f"in {leg}")

        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            plan = yield
            if leg == "schedule":
                self.end()
            return plan

        @hookimpl(wrapper=True)
        def trivet_run(self, plan: Any) -> Any:
            pending = yield
            if leg == "run":
                self.end()
            return pending

        @hookimpl(wrapper=True)
        def trivet_commit(self, plan: Any, result: Any) -> Any:
            events = yield
            if leg == "commit":
                self.end()
            return events

    with engine(kit, Ending(), executor={"use": "held", "depth": 2}) as e:
        submit(e)
        done = drain(e)
        assert {i for i, r in done.items() if r.message == f"in {leg}"} == {"0", "5"}
        expect(done, {i: w for i, w in WORK.items() if i not in ("0", "5")})
        check_free(e)


def test_only_an_error_or_an_abort_is_a_reason() -> None:
    with engine() as e:
        e.add_request("a", [1], greedy(2))
        with pytest.raises(ValueError, match="got 'stop'"):
            e.context.abort("a", "", reason="stop")
        drain(e)


def test_requests_can_be_ended_once_the_engine_runs() -> None:
    registry = Registry(EngineConfig.from_flat(config()), [fakes])
    try:
        with pytest.raises(RuntimeError, match="once the engine runs"):
            registry.engine_context.abort("a", "too early")
    finally:
        registry.shutdown()
