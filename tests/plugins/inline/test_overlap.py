"""Steps that overlap: the same tokens, two plans under way, everything of the worker's on one thread."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

import pytest
from engine_kit import check_free, config, drain, engine, expect, greedy, prompts

from trivet.engine import Engine
from trivet.hookspecs import hookimpl
from trivet.testing import fakes

OVERLAPPED = {"use": "inline", "async_scheduling": True}


@pytest.mark.parametrize("memory", [None, 26], ids=["ample", "short"])
def test_tokens_are_those_of_steps_in_turn(memory: int | None) -> None:
    cache = {"use": "paged", "block_size": 4} | ({"num_blocks": memory} if memory else {})
    work = {str(i): (prompt, 20) for i, prompt in enumerate(prompts(16))}
    with engine(executor=OVERLAPPED, cache=cache) as e:
        for request_id, (prompt, count) in work.items():
            e.add_request(request_id, prompt, greedy(count))
        expect(drain(e), work)
        check_free(e)


def test_a_step_is_planned_while_the_one_before_computes() -> None:
    """The worker waits in its first forward pass until the engine has planned the second step."""
    planned = threading.Semaphore(0)

    class Watch:
        overlapped: bool | None = None

        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            plan = yield
            planned.release()
            return plan

        @hookimpl(wrapper=True)
        def trivet_forward(self, batch: Any) -> Any:
            if self.overlapped is None:
                self.overlapped = planned.acquire(timeout=30) and planned.acquire(timeout=30)
            return (yield)

    watch = Watch()
    with engine(watch, executor=OVERLAPPED) as e:
        e.add_request("a", [1, 2, 3], greedy(2))
        e.step()
        assert watch.overlapped
        drain(e)


def test_the_worker_has_one_thread_for_everything() -> None:
    threads: dict[str, set[str]] = {}

    class Watch:
        @hookimpl(wrapper=True)
        def trivet_forward(self, batch: Any) -> Any:
            threads.setdefault("forward", set()).add(threading.current_thread().name)
            return (yield)

        @hookimpl(wrapper=True)
        def trivet_commit(self, plan: Any, result: Any) -> Any:
            threads.setdefault("commit", set()).add(threading.current_thread().name)
            return (yield)

    with engine(Watch(), executor=OVERLAPPED) as e:
        runner = e.parts.executor._runner
        checks: list[str] = []
        runner.check_integrity = lambda: checks.append(threading.current_thread().name)
        e.add_request("a", [1, 2, 3], greedy(3))
        drain(e)
        e.parts.executor.check_integrity()
        e.parts.executor.call("check_integrity")
        assert threads["commit"] == {threading.current_thread().name}
        assert threads["forward"] == set(checks) == {"trivet-worker_0"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trivet-worker")]


def test_a_fault_ends_the_requests_of_its_step_and_the_engine_goes_on() -> None:
    class Broken:
        steps = 0

        @hookimpl(wrapper=True)
        def trivet_forward(self, batch: Any) -> Any:
            self.steps += 1
            if self.steps == 4:
                raise RuntimeError("the fourth step")
            return (yield)

    with engine(Broken(), executor=OVERLAPPED) as e:
        e.add_request("a", [1, 2, 3], greedy(20))
        done = drain(e)
        assert done["a"].finish_reason == "error"
        assert "the fourth step" in (done["a"].message or "")
        e.add_request("b", [4, 5, 6], greedy(6))
        expect(drain(e), {"b": ([4, 5, 6], 6)})
        check_free(e)


def test_a_failed_start_leaves_no_thread() -> None:
    roles = config(max_model_len=100_000, executor=OVERLAPPED)
    with pytest.raises(Exception, match="100000 exceeds"):
        Engine(roles, [fakes])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trivet-worker")]


def test_the_flat_argument_sets_it() -> None:
    roles = config() | {"async_scheduling": True}
    e = Engine(roles, [fakes])
    try:
        assert e.parts.executor.max_in_flight == 2
        assert e.parts.executor.token_feedback
    finally:
        e.shutdown()


def test_a_plugin_that_ends_its_thread_ends_the_step_and_nothing_else() -> None:
    class Leaves:
        armed = True

        @hookimpl(wrapper=True)
        def trivet_forward(self, batch: Any) -> Any:
            if self.armed:
                self.armed = False
                raise SystemExit("enough")
            return (yield)

    with engine(Leaves(), executor=OVERLAPPED) as e:
        e.add_request("a", [1, 2, 3], greedy(3))
        done = drain(e)
        assert done["a"].finish_reason == "error"
        assert "the worker's thread was told to end: SystemExit('enough')" in done["a"].message
        e.add_request("b", [1, 2, 3], greedy(3))
        expect(drain(e), {"b": ([1, 2, 3], 3)})


def test_the_thread_ends_where_a_part_of_the_worker_cannot_be_shut_down() -> None:
    with engine(executor=OVERLAPPED) as e:
        executor = e.parts.executor
        worker = executor._worker

        def broken() -> None:
            raise OSError("it will not end")

        thread = executor._thread.submit(threading.current_thread).result()
        worker.shutdown_all = broken
        with pytest.raises(OSError, match="it will not end"):
            executor.shutdown()
        assert not thread.is_alive()
        del worker.shutdown_all
