"""Conformance of ``executor`` providers: order, faults, steps in flight, all on the fake model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from trivet.engine import Engine
from trivet.errors import WorkerFault
from trivet.roles import Executor, PendingStep, WorkerInfo
from trivet.testing.fake_model import reference_tokens
from trivet.testing.suites import _faults, _guess
from trivet.testing.suites._base import Suite, require
from trivet.testing.suites._drive import check_drained, check_outputs, drive, greedy, make_work, submit
from trivet.testing.suites._plans import PlanWriter, make_layout

NUM_BLOCKS = 60


class ExecutorSuite(Suite):
    """Runs engines and bare plans through an executor.

    Workers get the fakes and, in some tests, plugins of the suite, all of which can be loaded in other processes."""

    role: ClassVar[str] = "executor"

    @contextmanager
    def started(self, *more: object, **roles: Any) -> Iterator[Started]:
        """An executor whose workers have loaded the model and allocated storage, without an engine."""
        context = self.engine_context(*more, max_model_len=96, plugins=roles)
        context.prepare_workers(max_num_seqs=6, max_num_batched_tokens=64, tokenizer_size=64)
        executor: Executor = self.make(context)
        try:
            yield Started(executor)
        finally:
            executor.shutdown()
            context.shutdown_all()

    # ------------------------------------------------------------------ plans

    def test_start_says_what_the_worker_says(self) -> None:
        """``start`` returns plain data about the model."""
        with self.started() as worker:
            require(
                isinstance(worker.info, WorkerInfo), "start returns a WorkerInfo", Executor.start, returned=worker.info
            )
            require(
                worker.info.model.vocab_size == 64, "it is the worker's own", Executor.start, model=worker.info.model
            )
            depth = worker.executor.max_in_flight
            require(depth >= 1, "max_in_flight is at least 1", Executor, max_in_flight=depth)
            worker.executor.check_health()

    def test_results_come_in_the_order_of_submission(self) -> None:
        """As many steps as ``max_in_flight`` says are submitted before the first result is taken."""
        with self.started() as worker:
            for slot in range(6):
                worker.writer.add(slot, [slot, slot + 1], params=greedy(9))
            depth = max(worker.executor.max_in_flight, 1)
            for _ in range(3):
                # Rows of different requests, so that no step needs the outcome of another.
                plans = [worker.writer.plan({slot: worker.writer.pending(slot)}) for slot in range(min(depth, 6))]
                steps: list[PendingStep] = [worker.executor.submit(plan) for plan in plans]
                for plan, step in zip(plans, steps, strict=True):
                    result = step.result()
                    require(
                        result.step_id == plan.step_id and np.array_equal(result.slots, plan.slots),
                        "a step's result is that of its plan; steps end in the order of their submission",
                        PendingStep,
                        plan=plan.step_id,
                        result=result.step_id,
                    )
                    require(step.done(), "a step whose result was taken is done", PendingStep.done)
                    worker.writer.take(plan, result)
            for slot in range(min(depth, 6)):
                found = worker.writer.requests[slot].tokens[2:]
                expected = reference_tokens([slot, slot + 1], 3)
                require(
                    found == expected,
                    "plans reach the worker as they were",
                    Executor.submit,
                    found=found,
                    expected=expected,
                )

    def test_a_fault_is_raised_where_the_result_is_taken(self) -> None:
        """An exception of a worker phase comes out of ``result``, names its cause, and the next plans work."""
        with self.started(_faults) as worker:
            worker.writer.add(0, [1, _faults.POISON], params=greedy(9))
            worker.writer.add(1, [2, 3], params=greedy(9))
            step = worker.executor.submit(worker.writer.plan({0: 2}))
            with pytest.raises((WorkerFault, RuntimeError)) as caught:
                step.result()
            require(
                "the batch is poisoned" in str(caught.value),
                "a fault's message is the exception's",
                PendingStep.result,
                message=caught.value,
            )
            worker.executor.check_health()
            worker.writer.drop(0)
            for _ in range(2):
                plan = worker.writer.plan({1: worker.writer.pending(1)})
                worker.writer.take(plan, worker.executor.submit(plan).result())
            found = worker.writer.requests[1].tokens[2:]
            require(
                found == reference_tokens([2, 3], 2),
                "plans after a fault are carried out",
                Executor.submit,
                found=found,
            )

    def test_calls_of_the_runners_methods(self) -> None:
        """``call`` calls a public method of every runner, in rank order, and refuses others."""
        with self.started() as worker:
            answers = worker.executor.call("check_integrity")
            require(
                isinstance(answers, list) and len(answers) >= 1 and set(answers) == {None},
                "call returns one answer per worker",
                Executor.call,
                answers=answers,
            )
            for name in ("no_such_method", "_apply"):
                with pytest.raises((AttributeError, WorkerFault)) as caught:
                    worker.executor.call(name)
                require(
                    name in str(caught.value),
                    "a method that cannot be called is named",
                    Executor.call,
                    message=caught.value,
                )

    def test_shutdown_of_what_never_started(self) -> None:
        """``shutdown`` works for an executor that was only made, and twice."""
        context = self.engine_context()
        context.prepare_workers(max_num_seqs=6, max_num_batched_tokens=64, tokenizer_size=64)
        executor: Executor = self.make(context)
        executor.shutdown()
        executor.shutdown()
        context.shutdown_all()

    # ------------------------------------------------------------------ engines

    @pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
    @pytest.mark.parametrize("memory", [None, 26], ids=["ample", "short"])
    def test_in_an_engine(self, memory: int | None, drafts: bool) -> None:
        """Tokens are those of the naive loop, with as many steps in flight as the executor allows."""
        work = make_work(16, seed=1)
        cache = {"use": "paged", "block_size": 4} | ({"num_blocks": memory} if memory else {})
        roles: dict[str, Any] = {"drafter": [{"use": "guess"}]} if drafts else {}
        with self.engine(_guess, cache=cache, **roles) as engine:
            submit(engine, work)
            check_outputs(drive(engine), work, Executor.submit)

    def test_an_engine_survives_faults(self) -> None:
        """A failed step ends its own requests, a request's fault only that one; everything else goes on."""
        work = {i: w for i, w in make_work(12, seed=2).items() if not self.poisons(*w)}
        with self.engine(_faults, logits_processor=[{"use": "faulty"}]) as engine:
            submit(engine, work)
            engine.add_request("bad", [1, 2], greedy(20, extra_args={_faults.FAULT: 3}))
            done = drive(engine)
            bad = done["bad"]
            require(
                bad.finish_reason == "error" and "to end after 3" in (bad.message or ""),
                "a RequestFault ends the named request with its message",
                "trivet.errors.RequestFault",
                ended=f"{bad.finish_reason}: {bad.message}",
            )
            check_outputs(done, work, "trivet.errors.RequestFault")
            engine.add_request("poison", [5, _faults.POISON], greedy(4))
            submit(engine, {"0": work["0"]} if "0" in work else {})
            done = drive(engine)
            require(
                done["poison"].finish_reason == "error" and "poisoned" in (done["poison"].message or ""),
                "an exception of a worker phase ends the requests of its plan",
                Executor.submit,
                ended=f"{done['poison'].finish_reason}: {done['poison'].message}",
            )
            submit(engine, work)
            check_outputs(drive(engine), work, Executor.submit)

    @staticmethod
    def poisons(prompt: list[int], count: int) -> bool:
        """Whether a request computes the poisonous token."""
        return _faults.POISON in prompt or _faults.POISON in reference_tokens(prompt, count)

    def test_an_engine_that_is_shut_down_in_the_middle(self) -> None:
        """What has not finished is aborted, and steps in flight end."""
        with self.engine() as engine:
            submit(engine, make_work(10, seed=3))
            for _ in range(3):
                engine.step()
            engine.shutdown()
            self._check_stopped(engine)

    @staticmethod
    def _check_stopped(engine: Engine) -> None:
        left = list(engine.parts.lifecycle.requests)
        require(not left, "a shutdown ends every request", Executor.shutdown, unfinished=left)
        check_drained(engine)


class Started:
    """An executor with workers, and the plans for it."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.info = executor.start()
        layout = make_layout(self.info.specs, self.info.support, 4, NUM_BLOCKS)
        executor.configure_cache(layout)
        self.writer = PlanWriter(layout, NUM_BLOCKS, np.random.default_rng(0))
