"""Conformance of ``scheduler`` providers: real engines on the fake model, compared with the naive loop."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from trivet.context import Hold
from trivet.engine import Engine
from trivet.errors import OverloadedError
from trivet.roles import ScheduleInputs, Scheduler, StepWaits
from trivet.testing.suites import _guess, _late
from trivet.testing.suites._base import Suite, promised, require
from trivet.testing.suites._drive import (
    WAIT_KINDS,
    PlanWatch,
    check_drained,
    check_outputs,
    check_step,
    drive,
    greedy,
    make_work,
    submit,
)

AMPLE = {"use": "paged", "block_size": 4}
SHORT = {"use": "paged", "block_size": 4, "num_blocks": 26}


class SchedulerSuite(Suite):
    """Drives engines whose tokens depend on everything that a scheduler can get wrong."""

    role: ClassVar[str] = "scheduler"
    #: requests of one priority are admitted in the order of their arrival
    arrival_order: ClassVar[bool] = False
    #: a running request that only decodes advances in every step
    steady_decodes: ClassVar[bool] = False
    #: a waiting request gets its turn although others keep coming
    starvation_free: ClassVar[bool] = True
    #: after how many steps at most, in the test of the above
    max_wait_steps: ClassVar[int] = 200
    #: how often one request is preempted at most, however short memory is
    max_preemptions: ClassVar[int] = 12
    #: ``waits`` says why requests did not advance, for a step as a whole
    tells_waits: ClassVar[bool] = False
    #: name of the option that bounds the queue
    queue_bound: ClassVar[str | None] = None

    def sizes(self, max_num_seqs: int, max_num_batched_tokens: int) -> dict[str, Any]:
        """The options that set the limits; override it if yours have other names."""
        return {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}

    @contextmanager
    def scheduling(
        self,
        watch: PlanWatch | None = None,
        *,
        seqs: int = 8,
        budget: int = 32,
        depth: int = 1,
        drafts: bool = False,
        options: dict[str, Any] | None = None,
        **roles: Any,
    ) -> Iterator[tuple[Engine, PlanWatch]]:
        """An engine with this scheduler and a watch over its plans."""
        watch = watch or PlanWatch()
        roles = {"cache": AMPLE} | roles
        roles["scheduler"] = self.selection(**self.sizes(seqs, budget), **(options or {}))
        more: list[object] = [watch]
        if depth > 1:
            roles["executor"] = {"use": "late", "depth": depth}
            more.append(_late)
        if drafts:
            roles["drafter"] = [{"use": "guess"}]
            more.append(_guess)
        with self.engine(*more, **roles) as engine:
            watch.engine = engine
            watch.arrival_order, watch.steady_decodes = self.arrival_order, self.steady_decodes
            yield engine, watch

    # ------------------------------------------------------------------ tokens and limits

    @pytest.mark.parametrize("memory", [AMPLE, SHORT], ids=["ample", "short"])
    @pytest.mark.parametrize(("seqs", "budget"), [(8, 32), (8, 5), (3, 256), (1, 1)])
    def test_tokens_are_those_of_the_naive_loop(self, seqs: int, budget: int, memory: dict[str, Any]) -> None:
        """Whatever is scheduled when, every request gets its own tokens, within the limits, and waits for a reason."""
        work = make_work(20)
        with self.scheduling(seqs=seqs, budget=budget, cache=memory) as (engine, watch):
            submit(engine, work)
            check_outputs(drive(engine, watch, explain=True), work, Scheduler.schedule)

    @pytest.mark.parametrize("memory", [AMPLE, SHORT], ids=["ample", "short"])
    @pytest.mark.parametrize(("depth", "drafts"), [(2, False), (3, False), (1, True), (2, True)])
    def test_steps_in_flight_and_drafts(self, depth: int, drafts: bool, memory: dict[str, Any]) -> None:
        """Several steps in flight, and drafts to verify, change no token."""
        work = make_work(16, seed=1)
        with self.scheduling(budget=20, depth=depth, drafts=drafts, cache=memory) as (engine, watch):
            submit(engine, work)
            check_outputs(drive(engine, watch), work, Scheduler.schedule)

    def test_requests_that_come_while_others_run(self) -> None:
        """Arrivals at any time are served."""
        work = make_work(24, seed=2)
        queue = list(work.items())
        with self.scheduling(cache=SHORT) as (engine, watch):
            submit(engine, dict([queue.pop(0)]))

            def arrive(step: int) -> None:
                if queue and step % 3 == 0:
                    submit(engine, dict([queue.pop(0)]))

            done = drive(engine, watch, before_step=arrive)
            submit(engine, dict(queue))
            check_outputs(done | drive(engine, watch), work, Scheduler.add)

    def test_limits_are_known_before_the_engine_is(self) -> None:
        """``limits`` can be read before ``bind`` and says what the options say."""
        context = self.engine_context()
        limits = self.make(context, **self.sizes(3, 17)).limits
        require(
            (limits.max_num_seqs, limits.max_num_batched_tokens) == (3, 17),
            "limits are read before bind and say what the options say",
            Scheduler.limits,
            limits=limits,
        )

    # ------------------------------------------------------------------ what wrappers and holds may do

    def test_wrappers_that_lower_the_limits(self) -> None:
        """A wrapper of ``trivet_schedule`` lowers the token budget and the number of requests, down to nothing."""
        rng = random.Random(3)

        def change(inputs: ScheduleInputs) -> None:
            inputs.token_budget = rng.choice([0, 1, 3, inputs.token_budget])
            inputs.max_num_seqs = rng.choice([0, 2, inputs.max_num_seqs])

        work = make_work(12, seed=3)
        with self.scheduling(PlanWatch(change), cache=SHORT) as (engine, watch):
            submit(engine, work)
            check_outputs(drive(engine, watch), work, ScheduleInputs)

    def test_wrappers_that_hold_requests_for_a_step(self) -> None:
        """``inputs.holds`` keeps requests out of a step, whether they run or wait, and is the reason they wait for."""
        rng = random.Random(4)
        held: dict[str, str] = {}

        def change(inputs: ScheduleInputs) -> None:
            held.clear()
            held.update({i: f"held in step {inputs.step_id}" for i in work if rng.random() < 0.3})
            inputs.holds.update(held)

        work = make_work(12, seed=4)
        with self.scheduling(PlanWatch(change)) as (engine, watch):
            submit(engine, work)
            steps = 0
            while engine.has_work:
                engine.step()
                check_step(engine, watch)
                for request_id, reason in held.items():
                    wait = engine.explain(request_id)
                    known = request_id in engine.parts.lifecycle.requests
                    require(
                        not known or (wait is not None and wait.kind == "hold" and reason in wait.detail),
                        "explain gives the reason of a hold",
                        ScheduleInputs,
                        answer=wait,
                        reason=reason,
                    )
                steps += 1
                require(steps < 2000, "requests that are held now and then end", ScheduleInputs)
            check_drained(engine)

    @pytest.mark.parametrize("after", [0, 4])
    def test_a_held_request_waits_until_it_is_released(self, after: int) -> None:
        """A hold keeps a waiting or running request from being scheduled; the others go on; then it is served."""
        work = make_work(8, seed=5, most=12)
        with self.scheduling(seqs=16, budget=400) as (engine, watch):
            submit(engine, work)
            for _ in range(after):
                engine.step()
            target = next(iter(engine.parts.lifecycle.requests))
            engine.context.hold(target, Hold("test", "suite", "until the suite releases it", time.monotonic()))
            others = set(engine.parts.lifecycle.requests) - {target}
            for _ in range(60):
                engine.step()
                check_step(engine, watch)
            left = others & set(engine.parts.lifecycle.requests)
            require(not left, "requests that are not held go on", Scheduler.schedule, unfinished=left)
            wait = engine.explain(target)
            require(wait is not None and wait.kind == "hold", "explain names the hold", Scheduler.explain, answer=wait)
            engine.context.release(target, "suite", "test")
            done = drive(engine, watch)
            check_outputs(done, {target: work[target]}, Scheduler.schedule)

    # ------------------------------------------------------------------ fairness

    @promised("starvation_free")
    def test_no_request_starves(self) -> None:
        """A long prompt gets its first token although short ones keep coming."""
        rng = random.Random(6)
        with self.scheduling(seqs=2, budget=16) as (engine, watch):
            for i in range(6):
                engine.add_request(f"first-{i}", [rng.randrange(64)] * 3, greedy(3))
            engine.add_request("long", [rng.randrange(64) for _ in range(80)], greedy(4))
            request = engine.parts.lifecycle.requests["long"]
            for step in range(self.max_wait_steps):
                for i in range(2):
                    engine.add_request(f"{step}-{i}", [rng.randrange(64)] * 3, greedy(3))
                engine.step()
                check_step(engine, watch)
                if request.first_token_time is not None:
                    break
            require(
                request.first_token_time is not None,
                "a request gets its first token within max_wait_steps although others keep coming",
                "starvation_free",
                max_wait_steps=self.max_wait_steps,
                waits_for=engine.explain("long"),
            )
            engine.abort(list(engine.parts.lifecycle.requests))
            drive(engine, watch)

    @pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
    def test_preemption_comes_to_an_end(self, drafts: bool) -> None:
        """With memory for hardly one request, each is preempted a bounded number of times and all end."""
        work = make_work(10, seed=7, longest=12, most=70)
        with self.scheduling(seqs=8, budget=64, drafts=drafts, cache=SHORT) as (engine, watch):
            submit(engine, work)
            done = drive(engine, watch, steps=3000)
            check_outputs(done, work, Scheduler.schedule)
            most = max(request.num_preemptions for request in done.values())
            require(
                most <= self.max_preemptions,
                f"a request is preempted at most max_preemptions = {self.max_preemptions} times",
                Scheduler.requeue,
                preemptions=most,
            )

    # ------------------------------------------------------------------ reasons

    @promised("tells_waits")
    @pytest.mark.parametrize("short", [False, True], ids=["compute", "memory"])
    def test_reasons_of_a_whole_step(self, short: bool) -> None:
        """``waits`` agrees with ``explain`` about every slot that it names, and has a reason for the queue while
        somebody waits whom nothing holds."""
        work = make_work(16, seed=11)
        memory = (SHORT if short else AMPLE) | {"prefix_caching": False}
        kinds: set[str] = set()
        with self.scheduling(seqs=8, budget=64 if short else 9, cache=memory) as (engine, watch):
            submit(engine, work)

            def check(step: int) -> None:
                if step:
                    kinds.update(self._check_waits(engine))

            check_outputs(drive(engine, watch, before_step=check), work, Scheduler.waits)
        require(kinds, "waits gives reasons while requests wait", Scheduler.waits)

    @staticmethod
    def _check_waits(engine: Engine) -> set[str]:
        """The kinds of waits that a step had."""
        waits, table = engine.parts.scheduler.waits(), engine.table
        for kind, slots in (("compute", waits.compute), ("memory", waits.memory)):
            for slot in slots:
                request = table.requests[slot]
                wait = None if request is None else engine.explain(request.request_id)
                require(
                    wait is not None and wait.kind == kind,
                    "waits names running slots that explain gives the same kind of reason for",
                    StepWaits,
                    slot=slot,
                    kind=kind,
                    answer=wait,
                )
        free = [r.request_id for r in engine.parts.lifecycle.requests.values() if r.slot < 0 and not r.holds]
        require(
            not free or (waits.queue is not None and waits.queue.kind in WAIT_KINDS and waits.queue.detail),
            "waits.queue says why the next request was not admitted while any waits",
            StepWaits,
            waiting=free,
            answer=waits.queue,
        )
        kinds = {kind for kind, slots in (("compute", waits.compute), ("memory", waits.memory)) if slots}
        return kinds | ({waits.queue.kind} if waits.queue is not None else set())

    # ------------------------------------------------------------------ ends

    @pytest.mark.parametrize("depth", [1, 2])
    def test_an_abort_at_any_moment(self, depth: int) -> None:
        """Requests that wait, run, were preempted, have ended or never existed are aborted; nothing is left behind."""
        rng = random.Random(8)
        work = make_work(30, seed=8)
        with self.scheduling(depth=depth, cache=SHORT) as (engine, watch):
            submit(engine, work)
            engine.abort(["0", "never existed"])
            aborted = {"0"}

            def abort(_step: int) -> None:
                if rng.random() < 0.4:
                    target = str(rng.randrange(30))
                    aborted.add(target)
                    engine.abort([target])

            done = drive(engine, watch, before_step=abort)
            ended = {i for i, request in done.items() if request.finish_reason == "abort"}
            require(ended <= aborted, "only aborted requests end by it", Scheduler.remove, ended=ended - aborted)
            check_outputs(done, {i: w for i, w in work.items() if i not in ended}, Scheduler.remove)

    def test_an_end_in_the_queue(self) -> None:
        """A request that waits is dropped at once, and dropping it again has no effect."""
        with self.scheduling(seqs=1) as (engine, watch):
            submit(engine, make_work(5, seed=9))
            engine.step()
            request = engine.parts.lifecycle.requests["3"]
            before = engine.parts.scheduler.num_waiting
            engine.abort(["3"])
            after = engine.parts.scheduler.num_waiting
            require(after == before - 1, "remove drops a waiting request", Scheduler.remove, before=before, after=after)
            engine.parts.scheduler.remove(request)
            again = engine.parts.scheduler.num_waiting
            require(again == after, "remove has no effect on a request that is not queued", Scheduler.remove)
            drive(engine, watch)

    @promised("queue_bound")
    def test_a_full_queue_refuses(self) -> None:
        """A request beyond the queue's bound is refused as overload, and nothing else is touched."""
        assert self.queue_bound is not None
        work = make_work(3, seed=10)
        with self.scheduling(options={self.queue_bound: 2}) as (engine, watch):
            submit(engine, {i: work[i] for i in "01"})
            with pytest.raises(OverloadedError):
                submit(engine, {"2": work["2"]})
            done = drive(engine, watch)
            check_outputs(done, {i: work[i] for i in "01"}, Scheduler.add)
            require("2" not in done, "a refused request is not queued", Scheduler.add)
