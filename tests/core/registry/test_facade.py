"""The typed facade: direct slots, one pluggy call per wrapped phase, guarded wrappers, detached observers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trivet.errors import PluginError
from trivet.hookspecs import hookimpl
from trivet.plan import StepPlan
from trivet.result import StepResult
from trivet.roles import ForwardOutput, ScheduleInputs


def inputs() -> ScheduleInputs:
    return ScheduleInputs(step_id=1, token_budget=64, max_num_seqs=8)


def schedule(given: ScheduleInputs) -> StepPlan:
    return StepPlan(step_id=given.step_id)


class Quiet:
    """A wrapper of every phase that changes nothing."""

    @hookimpl(wrapper=True)
    def trivet_schedule(self, inputs: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def trivet_run(self, plan: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def trivet_commit(self, plan: Any, result: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def trivet_forward(self, batch: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def trivet_sample(self, logits: Any, rows: Any) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def trivet_draft(self, inputs: Any) -> Any:
        return (yield)


class TestSlots:
    def test_without_wrappers_a_slot_is_the_providers_own_method(self, world: Any, my_scheduler: Any) -> None:
        hooks = world.registry(None, my_scheduler).freeze(schedule=my_scheduler.schedule)
        assert hooks.schedule == my_scheduler.schedule
        hooks.bind("run", my_scheduler.add)
        assert hooks.run == my_scheduler.add
        hooks.schedule(inputs())
        assert hooks.pluggy_calls == 0

    def test_a_wrapped_phase_is_one_pluggy_call(self, world: Any) -> None:
        hooks = world.registry(None, Quiet(), Quiet()).freeze(schedule=schedule)
        assert hooks.schedule(inputs()).step_id == 1
        assert hooks.pluggy_calls == 1
        hooks.bind("run", lambda plan: "pending")  # type: ignore[arg-type,return-value]
        hooks.bind("commit", lambda plan, result: (plan, result))  # type: ignore[arg-type,return-value]
        assert hooks.run("plan") == "pending"
        assert hooks.commit("plan", "result") == ("plan", "result")
        assert hooks.pluggy_calls == 3

    def test_only_the_wrapped_phase_goes_through_pluggy(self, world: Any) -> None:
        class One:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                return (yield)

        hooks = world.registry(None, One()).freeze(schedule=schedule, run=len)
        assert hooks.run == len
        assert hooks.wrappers("run") == ()
        assert hooks.wrappers("schedule") == ("One",)

    def test_worker_phases(self, world: Any) -> None:
        from trivet.plan import Ragged
        from trivet.roles import Drafts

        registry = world.registry(None, Quiet())
        hooks = registry.worker_context(max_num_seqs=1, max_num_batched_tokens=1).hooks
        drafts, output = Drafts(Ragged.empty()), ForwardOutput(logits=1)
        hooks.bind("forward", lambda batch: output)
        hooks.bind("sample", lambda logits, rows: (logits, rows))
        hooks.bind("draft", lambda inputs: drafts)
        assert hooks.forward("batch") is output
        assert hooks.sample("logits", "rows") == ("logits", "rows")
        assert hooks.draft("inputs") is drafts
        assert hooks.pluggy_calls == 3

    def test_an_empty_slot_says_what_to_do(self, world: Any) -> None:
        hooks = world.registry().freeze()
        with pytest.raises(AttributeError, match="phase 'schedule' is not bound yet"):
            hooks.schedule(inputs())
        with pytest.raises(AttributeError, match="no attribute 'forward'"):
            hooks.forward  # noqa: B018 - the access is the test
        with pytest.raises(ValueError, match="EngineHooks has schedule, run, commit"):
            hooks.bind("forward", len)


class TestWrappers:
    def test_a_wrapper_changes_the_inputs_and_reads_the_plan(self, world: Any) -> None:
        seen: list[Any] = []

        class Throttle:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                inputs.token_budget = 3
                inputs.holds["r1"] = "quota"
                plan = yield
                seen.append(plan)
                return plan

        given = inputs()
        plan = world.registry(None, Throttle()).freeze(schedule=schedule).schedule(given)
        assert seen == [plan]
        assert (given.token_budget, given.holds) == (3, {"r1": "quota"})

    def test_the_order_is_tryfirst_outermost_then_the_later_registered(self, world: Any) -> None:
        order: list[str] = []

        def make(name: str, **marks: Any) -> Any:
            class Wrapper:
                trivet_name = name

                @hookimpl(wrapper=True, **marks)
                def trivet_schedule(self, inputs: Any) -> Any:
                    order.append(name)
                    return (yield)

            return Wrapper()

        objects = [make("eager", tryfirst=True), make("first"), make("second"), make("late", trylast=True)]
        hooks = world.registry(None, *objects).freeze(schedule=schedule)
        hooks.schedule(inputs())
        assert order == ["eager", "second", "first", "late"]
        assert hooks.wrappers("schedule") == tuple(order)

    def test_wrappers_may_take_fewer_arguments(self, world: Any) -> None:
        seen: list[Any] = []

        class Late:
            @hookimpl(wrapper=True)
            def trivet_commit(self, result: Any) -> Any:
                seen.append(result)
                return (yield)

        hooks = world.registry(None, Late()).freeze(commit=lambda plan, result: "events")
        assert hooks.commit(StepPlan(1), "result") == "events"
        assert seen == ["result"]

    @pytest.mark.parametrize("phase", ["schedule", "run", "commit"])
    def test_a_wrapper_that_returns_nothing_is_named(self, world: Any, phase: str) -> None:
        class Forgetful:
            @hookimpl(wrapper=True, specname=f"trivet_{phase}")
            def around(self) -> Any:
                result = yield
                return result if self is None else None

        hooks = world.registry(None, Forgetful()).freeze(**{phase: lambda *arguments: object()})
        with pytest.raises(
            PluginError, match=rf"plugin 'Forgetful' .*trivet_{phase} at .*returned nothing; .*return result"
        ):
            getattr(hooks, phase)(*[inputs()] * (2 if phase == "commit" else 1))
        assert hooks.errors["Forgetful", f"trivet_{phase}"] == 1

    def test_a_wrapper_without_any_return_is_refused_before_the_start(self, world: Any) -> None:
        class Forgetful:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                inputs.token_budget = 3
                yield

        with pytest.raises(PluginError, match="plugin 'Forgetful' .*trivet_schedule at .*returns nothing; .*return"):
            world.registry(None, Forgetful())

    def test_a_wrapper_that_always_raises_is_taken(self, world: Any) -> None:
        class Strict:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                yield
                raise ValueError("nothing may run")

        hooks = world.registry(None, Strict()).freeze(schedule=schedule)
        with pytest.raises(ValueError, match="nothing may run"):
            hooks.schedule(inputs())

    def test_a_wrapper_that_hands_its_work_on_is_taken(self, world: Any) -> None:
        class Split:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                return (yield from self.rest())

            def rest(self) -> Any:
                return (yield)

        hooks = world.registry(None, Split()).freeze(schedule=schedule)
        assert isinstance(hooks.schedule(inputs()), StepPlan)

    def test_a_wrapper_that_returns_another_plan_is_named(self, world: Any) -> None:
        class Forger:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                yield
                return StepPlan(99)

        hooks = world.registry(None, Forger()).freeze(schedule=schedule)
        with pytest.raises(PluginError, match="'Forger'.*returned another StepPlan than it got from yield"):
            hooks.schedule(inputs())

    def test_a_wrapper_of_forward_may_return_another_output_but_nothing_else(self, world: Any) -> None:
        class Replace:
            def __init__(self, output: Any) -> None:
                self.output = output

            @hookimpl(wrapper=True)
            def trivet_forward(self) -> Any:
                yield
                return self.output

        for output, fails in ((ForwardOutput(logits=2), False), ("text", True)):
            context = world.registry(None, Replace(output)).worker_context(max_num_seqs=1, max_num_batched_tokens=1)
            context.hooks.bind("forward", lambda batch: ForwardOutput(logits=1))
            if fails:
                with pytest.raises(PluginError, match="returned str, expected ForwardOutput"):
                    context.hooks.forward("batch")
            else:
                assert context.hooks.forward("batch") is output

    @pytest.mark.parametrize(
        ("body", "part"),
        [
            ("if inputs is None:\n        yield\n    return 1", "returned without a yield"),
            ("result = yield\n    yield\n    return result", "has a second yield"),
        ],
    )
    def test_a_wrapper_yields_once(self, world: Any, body: str, part: str) -> None:
        world.plugin("odd", f"@hookimpl(wrapper=True)\ndef trivet_schedule(inputs):\n    {body}\n")
        hooks = world.registry({"extension": ["odd"]}).freeze(schedule=schedule)
        with pytest.raises(PluginError, match=f"plugin 'odd' .*{part}"):
            hooks.schedule(inputs())

    @pytest.mark.parametrize("place", ["before", "after"])
    def test_a_wrappers_exception_passes_with_its_name(self, world: Any, place: str) -> None:
        class Faulty:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                if place == "before":
                    raise ValueError("boom")
                plan = yield
                if place == "after":
                    raise ValueError("boom")
                return plan

        hooks = world.registry(None, Quiet(), Faulty()).freeze(schedule=schedule)
        with pytest.raises(ValueError, match="boom") as caught:
            hooks.schedule(inputs())
        (note,) = caught.value.__notes__
        assert note.startswith("raised in trivet_schedule of plugin 'Faulty'")
        assert hooks.errors == {("Faulty", "trivet_schedule"): 1}

    def test_the_providers_exception_passes_through_wrappers_unblamed(self, world: Any) -> None:
        cleaned: list[str] = []

        class Careful:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                try:
                    return (yield)
                finally:
                    cleaned.append("up")

        def fail(given: Any) -> StepPlan:
            raise KeyError("scheduler")

        hooks = world.registry(None, Quiet(), Careful()).freeze(schedule=fail)
        with pytest.raises(KeyError) as caught:
            hooks.schedule(inputs())
        assert not hasattr(caught.value, "__notes__")
        assert hooks.errors == {}
        assert cleaned == ["up"]

    def test_a_wrapper_cannot_hide_an_exception(self, world: Any) -> None:
        class Hider:
            @hookimpl(wrapper=True)
            def trivet_schedule(self, inputs: Any) -> Any:
                try:
                    return (yield)
                except KeyError:
                    return StepPlan(1)

        def fail(given: Any) -> StepPlan:
            raise KeyError("scheduler")

        hooks = world.registry(None, Hider()).freeze(schedule=fail)
        with pytest.raises(PluginError, match="'Hider'.*hid the exception KeyError") as caught:
            hooks.schedule(inputs())
        assert isinstance(caught.value.__cause__, KeyError)

    def test_calls_and_time_are_counted_by_plugin(self, world: Any) -> None:
        hooks = world.registry(None, Quiet()).freeze(schedule=schedule)
        for _ in range(3):
            hooks.schedule(inputs())
        assert hooks.stats.calls["Quiet", "trivet_schedule"] == 3
        assert hooks.stats.seconds["Quiet", "trivet_schedule"] > 0


class Recorder:
    """Records what it is told; raises on demand."""

    def __init__(self, log: list[Any], name: str, *, fails: bool = False) -> None:
        self.log, self.trivet_name, self.fails = log, name, fails

    @hookimpl
    def trivet_step_finished(self, event: Any) -> None:
        self.log.append((self.trivet_name, event))
        if self.fails:
            raise ValueError("boom")


class TestObservers:
    def test_they_are_told_in_the_order_of_registration_without_pluggy(self, world: Any) -> None:
        log: list[Any] = []
        hooks = world.registry(None, *(Recorder(log, name) for name in "cab")).freeze()
        hooks.step_finished("event")
        assert log == [("c", "event"), ("a", "event"), ("b", "event")]
        assert hooks.pluggy_calls == 0

    def test_one_that_raises_is_logged_once_counted_and_detached(
        self, world: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        log: list[Any] = []
        recorders = [Recorder(log, "a"), Recorder(log, "bad", fails=True), Recorder(log, "c")]
        hooks = world.registry(None, *recorders).freeze()
        with caplog.at_level(logging.ERROR, logger="trivet.hooks"):
            for event in (1, 2, 3):
                hooks.step_finished(event)
        assert log == [("a", 1), ("bad", 1), ("c", 1), ("a", 2), ("c", 2), ("a", 3), ("c", 3)]
        (record,) = caplog.records
        assert "plugin 'bad' raised in trivet_step_finished" in record.getMessage()
        assert record.exc_info is not None
        assert hooks.errors == {("bad", "trivet_step_finished"): 1}

    def test_an_empty_slot_can_be_skipped(self, world: Any) -> None:
        log: list[Any] = []
        hooks = world.registry(None, Recorder(log, "bad", fails=True)).freeze()
        assert hooks.has_observers("step_finished")
        assert hooks.has_observers("trivet_step_finished")
        assert not hooks.has_observers("requests_added")
        hooks.requests_added("nobody listens")
        hooks.step_finished("event")
        assert not hooks.has_observers("step_finished")

    def test_detaching_is_by_hook(self, world: Any) -> None:
        told: list[str] = []

        class Half:
            @hookimpl
            def trivet_step_finished(self, event: Any) -> None:
                raise ValueError("boom")

            @hookimpl
            def trivet_engine_stopped(self, reason: str) -> None:
                told.append(reason)

        hooks = world.registry(None, Half()).freeze()
        hooks.step_finished("event")
        hooks.engine_stopped("shutdown")
        assert told == ["shutdown"]

    def test_a_keyboard_interrupt_is_not_an_observers_fault(self, world: Any) -> None:
        class Interrupted:
            @hookimpl
            def trivet_step_finished(self) -> None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            world.registry(None, Interrupted()).freeze().step_finished("event")

    def test_every_observer_hook_is_delivered(self, world: Any) -> None:
        from trivet.hookspecs import OBSERVER_HOOKS

        told: dict[str, Any] = {}

        def observer(hook: str) -> Any:
            arguments = {"trivet_engine_started": "context", "trivet_engine_stopped": "reason"}.get(hook, "event")
            scope: dict[str, Any] = {"told": told}
            exec(f"def {hook}(self, {arguments}): told[{hook!r}] = {arguments}", scope)
            return hookimpl(scope[hook])

        everything = type("Everything", (), {hook: observer(hook) for hook in OBSERVER_HOOKS})()
        hooks = world.registry(None, everything).freeze()
        for hook in OBSERVER_HOOKS:
            getattr(hooks, hook.removeprefix("trivet_"))(hook)
        assert told == {hook: hook for hook in OBSERVER_HOOKS}


def test_the_number_of_pluggy_calls_does_not_depend_on_the_batch(world: Any) -> None:
    import numpy as np

    counts = []
    for rows in (1, 64):
        hooks = world.registry(None, Quiet()).freeze(
            schedule=lambda given, rows=rows: StepPlan(given.step_id, slots=np.arange(rows, dtype=np.int32)),
            run=lambda plan: StepResult(plan.step_id, slots=plan.slots),
            commit=lambda plan, result: list(result.slots),
        )
        plan = hooks.schedule(inputs())
        assert len(hooks.commit(plan, hooks.run(plan))) == rows
        counts.append(hooks.pluggy_calls)
    assert counts == [3, 3]
