"""A plugin's exception, by the kind of hook it happens in: what ends, what goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from engine_kit import check_free, drain, engine, expect, greedy, prompts

from trivet.errors import EngineUnhealthyError, RequestFault
from trivet.hookspecs import hookimpl
from trivet.testing.fake_model import reference_tokens

WORK = {str(i): (p, 12) for i, p in enumerate(prompts(8, seed=2))}


class Trouble:
    """Raises in one phase at its ``nth`` call, before or after the yield."""

    def __init__(self, phase: str, error: BaseException, nth: int = 3, after: bool = False) -> None:
        self.left, self.error, self.after = nth, error, after
        self.phase = phase

    def around(self) -> Any:
        self.left -= 1
        if not self.left and not self.after:
            raise self.error
        result = yield
        if not self.left and self.after:
            raise self.error
        return result


def trouble(phase: str, error: BaseException, **when: Any) -> Any:
    state = Trouble(phase, error, **when)

    class Plugin:
        if phase == "schedule":

            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                return (yield from state.around())

        if phase == "run":

            @hookimpl(wrapper=True)
            def trivet_run(self, plan: Any) -> Any:
                return (yield from state.around())

        if phase == "commit":

            @hookimpl(wrapper=True)
            def trivet_commit(self, plan: Any, result: Any) -> Any:
                return (yield from state.around())

        if phase == "forward":

            @hookimpl(wrapper=True)
            def trivet_forward(self, batch: Any) -> Any:
                return (yield from state.around())

        if phase == "sample":

            @hookimpl(wrapper=True)
            def trivet_sample(self, logits: Any, rows: Any) -> Any:
                return (yield from state.around())

    return Plugin()


def submit(e: Any) -> None:
    for request_id, (prompt, count) in WORK.items():
        e.add_request(request_id, prompt, greedy(count))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("phase", ["forward", "sample", "run"])
def test_a_worker_phase_ends_the_requests_of_that_plan_only(phase: str, after: bool) -> None:
    plugin = trouble(phase, RuntimeError("the wrapper broke"), after=after)
    scheduler = {"use": "continuous", "max_num_batched_tokens": 32, "max_num_seqs": 3}
    with engine(plugin, scheduler=scheduler) as e:
        submit(e)
        done = drain(e)
        failed = {i for i, r in done.items() if r.finish_reason == "error"}
        assert 0 < len(failed) <= 3, "those of one plan"
        for request_id in failed:
            assert "the wrapper broke" in done[request_id].message
            assert "Plugin" in done[request_id].message, "the message names the plugin"
        expect({i: r for i, r in done.items() if i not in failed}, {i: w for i, w in WORK.items() if i not in failed})
        assert e.fault is None
        check_free(e)
        e.add_request("again", [1, 2, 3], greedy(4))
        assert drain(e)["again"].output_ids == reference_tokens([1, 2, 3], 4)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("phase", ["forward", "sample"])
def test_a_request_fault_ends_the_named_requests_only(phase: str, after: bool) -> None:
    plugin = trouble(phase, RequestFault({"2": "not allowed here", "5": "nor there"}), nth=4, after=after)
    with engine(plugin) as e:
        submit(e)
        done = drain(e)
        ended = {i: done[i].message for i in WORK if done[i].finish_reason == "error"}
        assert ended
        assert ended.items() <= {"2": "not allowed here", "5": "nor there"}.items()
        expect(done, {i: w for i, w in WORK.items() if i not in ended})
        check_free(e)


def test_a_request_fault_that_names_nobody_is_the_plugins_own() -> None:
    with engine(trouble("sample", RequestFault({"stranger": "?"}))) as e:
        submit(e)
        done = drain(e)
        assert any(r.finish_reason == "error" and "stranger" in r.message for r in done.values())
        check_free(e)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("phase", ["schedule", "commit"])
def test_schedule_and_commit_leave_the_state_suspect(phase: str, after: bool) -> None:
    stopped = []

    class Watch:
        @hookimpl
        def trivet_engine_stopped(self, reason: str) -> None:
            stopped.append(reason)

    with engine(trouble(phase, RuntimeError("lost"), after=after), Watch()) as e:
        submit(e)
        done = drain(e, check=False)
        assert len(done) == len(WORK)
        assert {r.finish_reason for r in done.values()} == {"error"}
        assert all("lost" in r.message for r in done.values())
        assert "lost" in e.fault
        with pytest.raises(EngineUnhealthyError, match="lost"):
            e.add_request("late", [1], greedy(1))
    assert len(stopped) == 1
    assert "lost" in stopped[0]


def test_an_observer_that_raises_is_logged_once_counted_and_detached(caplog: Any) -> None:
    seen: list[int] = []

    class Broken:
        @hookimpl
        def trivet_step_finished(self, event: Any) -> None:
            raise RuntimeError("observer broke")

    class Good:
        @hookimpl
        def trivet_step_finished(self, event: Any) -> None:
            seen.append(event.plan.step_id)

    with caplog.at_level(logging.ERROR), engine(Broken(), Good()) as e:
        submit(e)
        expect(drain(e), WORK)
        assert len(seen) > 10
        assert sum(e.hooks.errors.values()) == 1
    assert sum("no longer told" in r.message for r in caplog.records) == 1


def test_a_wrapper_that_returns_nothing_is_named() -> None:
    class Forgetful:
        @hookimpl(wrapper=True)
        def trivet_sample(self, logits: Any, rows: Any) -> Any:
            result = yield
            return result if logits is None else None

    with engine(Forgetful()) as e:
        submit(e)
        done = drain(e)
        for request in done.values():
            assert request.finish_reason == "error"
            assert "Forgetful" in request.message
            assert "return result" in request.message


def test_events_tell_of_every_request_once() -> None:
    added: list[str] = []
    ended: list[tuple[str, str]] = []
    legs: set[str] = set()

    class Watch:
        @hookimpl
        def trivet_requests_added(self, event: Any) -> None:
            added.extend(r.request_id for r in event.requests)

        @hookimpl
        def trivet_requests_finished(self, event: Any) -> None:
            ended.extend((f.request.request_id, f.reason) for f in event.finished)

        @hookimpl
        def trivet_step_finished(self, event: Any) -> None:
            legs.update(event.seconds)

    with engine(Watch()) as e:
        submit(e)
        e.step()
        e.abort(["3"])
        drain(e)
    assert added == list(WORK)
    assert sorted(ended) == [(i, "abort" if i == "3" else "length") for i in sorted(WORK)]
    assert {"schedule", "run", "commit", "forward", "sample"} <= legs


@pytest.mark.parametrize("wrapped", [(), ("sample",), ("schedule", "run", "commit", "forward", "sample")])
def test_pluggy_calls_per_step_do_not_grow_with_the_batch(wrapped: tuple[str, ...]) -> None:
    def calls_per_step(requests: int) -> float:
        plugins = [trouble(phase, RuntimeError("never"), nth=-1) for phase in wrapped]
        scheduler = {"use": "continuous", "max_num_batched_tokens": 4096, "max_num_seqs": 64}
        with engine(*plugins, scheduler=scheduler) as e:
            worker = e.context.get("executor")._worker
            for i in range(requests):
                e.add_request(str(i), [1, 2, 3], greedy(10))
            before, steps = e.hooks.pluggy_calls + worker.hooks.pluggy_calls, 0
            while e.has_work:
                e.step()
                steps += 1
            return (e.hooks.pluggy_calls + worker.hooks.pluggy_calls - before) / steps

    assert calls_per_step(1) == calls_per_step(64) == len(wrapped)
