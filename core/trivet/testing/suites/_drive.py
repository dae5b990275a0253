"""Requests for the fake model, and a loop around an engine that checks everything after every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.engine import Engine
from trivet.hookspecs import hookimpl
from trivet.roles import ScheduleInputs, Scheduler
from trivet.state import Request
from trivet.testing.fake_model import reference_tokens
from trivet.testing.suites._base import require
from trivet_schemas.sampling import SamplingParams

if TYPE_CHECKING:
    from trivet.plan import StepPlan

Work = Mapping[str, tuple[list[int], int]]
"""Request id → prompt and number of tokens to generate."""

WAIT_KINDS = ("compute", "memory", "turn", "hold")


def make_work(count: int, seed: int = 0, *, longest: int = 40, most: int = 20) -> dict[str, tuple[list[int], int]]:
    """Requests of mixed lengths."""
    rng = random.Random(seed)
    return {
        str(i): ([rng.randrange(64) for _ in range(rng.randint(1, longest))], rng.randint(1, most))
        for i in range(count)
    }


def greedy(tokens: int, **fields: Any) -> SamplingParams:
    """Parameters of a greedy request."""
    return SamplingParams(max_tokens=tokens, temperature=0, **fields)


def submit(engine: Engine, work: Work, **fields: Any) -> None:
    """Queue every request."""
    for request_id, (prompt, count) in work.items():
        engine.add_request(request_id, prompt, greedy(count, **fields))


class PlanWatch:
    """A wrapper of ``trivet_schedule`` that compares every plan with what it was made from.

    ``change`` may alter the inputs first. A broken rule is kept in :attr:`problem`, because an exception here would
    look like a fault of the engine."""

    def __init__(self, change: Callable[[ScheduleInputs], None] | None = None) -> None:
        self.change = change
        self.engine: Engine | None = None
        self.problem: AssertionError | None = None
        self.plans: list[StepPlan] = []
        self.arrival_order = self.steady_decodes = False

    @hookimpl(wrapper=True)
    def trivet_schedule(self, inputs: ScheduleInputs) -> Generator[None, StepPlan, StepPlan]:
        """Check the plan."""
        if self.change is not None:
            self.change(inputs)
        given = (inputs.token_budget, inputs.max_num_seqs, dict(inputs.holds))
        decoding = self._decoding(inputs)
        plan = yield
        self.plans.append(plan)
        try:
            self._check(plan, given, decoding)
        except AssertionError as problem:
            self.problem = self.problem or problem
        return plan

    def _decoding(self, inputs: ScheduleInputs) -> set[int]:
        """Slots that need one token (and verify drafts), if the budget is enough for all of them."""
        assert self.engine is not None
        table = self.engine.table
        found = set()
        tokens = 0
        for slot in table.order.tolist():
            request = table.requests[slot]
            assert request is not None
            pending = table.num_known[slot] + table.num_placeholders[slot] - table.num_computed[slot]
            free = not table.in_flight[slot] and not request.holds and request.request_id not in inputs.holds
            if pending == 1 and free:
                found.add(slot)
                tokens += 1 + int(table.num_drafts[slot])
        return found if tokens <= inputs.token_budget else set()

    def _check(self, plan: StepPlan, given: tuple[int, int, dict[str, str]], decoding: set[int]) -> None:
        assert self.engine is not None
        budget, seqs, holds = given
        table, limits = self.engine.table, self.engine.parts.limits
        require(
            plan.num_tokens <= min(budget, limits.max_num_batched_tokens),
            "a plan computes at most inputs.token_budget tokens",
            ScheduleInputs,
            tokens=plan.num_tokens,
            token_budget=budget,
        )
        require(
            not plan.new or table.num_running <= min(seqs, limits.max_num_seqs),
            "requests are admitted only while fewer than inputs.max_num_seqs run",
            ScheduleInputs,
            running=table.num_running,
            max_num_seqs=seqs,
        )
        require(len(set(plan.slots.tolist())) == plan.num_rows, "a slot is in a plan once", Scheduler.schedule)
        for slot in plan.slots.tolist():
            request = table.requests[slot]
            assert request is not None
            require(
                request.request_id not in holds and not request.holds,
                "a held request is not scheduled",
                ScheduleInputs,
                request=request.request_id,
                holds=holds.get(request.request_id) or request.holds,
            )
        if self.steady_decodes and not self.engine.parts.planner.memory_pending:
            missing = decoding - set(plan.slots.tolist()) - set(plan.preempted.tolist())
            require(
                not missing,
                "every running request that only decodes advances in every step",
                "steady_decodes",
                slots=missing,
            )
        if self.arrival_order and plan.new:
            self._check_order(plan, holds)

    def _check_order(self, plan: StepPlan, holds: dict[str, str]) -> None:
        assert self.engine is not None
        last = max(
            r.index for r in self.engine.table.requests if r is not None and r.slot in {n.slot for n in plan.new}
        )
        passed = [
            r.request_id
            for r in self.engine.parts.lifecycle.requests.values()
            if r.slot < 0 and not r.holds and r.request_id not in holds and r.index < last
        ]
        require(
            not passed,
            "requests are admitted in the order of their arrival, preempted ones before those that arrived later",
            "arrival_order",
            passed_over=passed,
        )


def drive(
    engine: Engine,
    watch: PlanWatch | None = None,
    *,
    steps: int = 3000,
    explain: bool = False,
    before_step: Callable[[int], None] | None = None,
) -> dict[str, Request]:
    """Step until nothing is left; the ended requests by id. The state is checked after every step."""
    done: dict[str, Request] = {}
    count = 0
    while engine.has_work:
        if before_step is not None:
            before_step(count)
        seen = len(watch.plans) if watch is not None else 0
        for end in engine.step().finished:
            done[end.request.request_id] = end.request
        check_step(engine, watch)
        if explain and watch is not None:
            check_explanations(engine, watch.plans[seen:])
        count += 1
        require(count < steps, "all requests end", Scheduler, steps=count, unfinished=waits(engine))
    check_drained(engine)
    return done


def check_step(engine: Engine, watch: PlanWatch | None) -> None:
    """What must hold after every step."""
    if watch is not None and watch.problem is not None:
        raise watch.problem
    require(
        engine.fault is None, "no step leaves the engine unhealthy", "docs/contracts.md, faults", fault=engine.fault
    )
    engine.check_integrity()
    waiting = sum(r.slot < 0 for r in engine.parts.lifecycle.requests.values())
    counted = engine.parts.scheduler.num_waiting
    require(
        counted == waiting,
        "num_waiting counts every queued request",
        Scheduler.num_waiting,
        counted=counted,
        queued=waiting,
    )


def check_explanations(engine: Engine, plans: list[StepPlan]) -> None:
    """Every request that did not advance waits for a reason."""
    advanced = {(int(s), int(e)) for plan in plans for s, e in zip(plan.slots, plan.epochs, strict=True)}
    for request in engine.parts.lifecycle.requests.values():
        if (request.slot, request.epoch) in advanced:
            continue
        wait = engine.explain(request.request_id)
        require(
            wait is not None and wait.kind in WAIT_KINDS and wait.detail,
            f"explain gives a reason ({', '.join(WAIT_KINDS)}) for every request that did not advance",
            Scheduler.explain,
            request=request.request_id,
            running=request.slot >= 0,
            answer=wait,
        )


def waits(engine: Engine) -> dict[str, Any]:
    """Why each unfinished request waits."""
    return {request_id: engine.explain(request_id) for request_id in engine.parts.lifecycle.requests}


def check_drained(engine: Engine) -> None:
    """Once nothing is left to do, no block is in use."""
    engine.parts.cache.reset()
    stats = engine.parts.cache.stats()
    require(
        stats.free == stats.total,
        "once the engine has drained, no block is in use",
        "docs/contracts.md, invariants",
        stats=stats,
    )


def check_outputs(done: Mapping[str, Request], work: Work, where: object, **model: Any) -> None:
    """Every request ended by its length with the tokens of the naive loop."""
    for request_id, (prompt, count) in work.items():
        request = done[request_id]
        expected = reference_tokens(prompt, count, **model)
        require(
            request.finish_reason == "length" and request.output_ids == expected,
            "every request gets the tokens that it gets alone",
            where,
            request=request_id,
            prompt_tokens=len(prompt),
            ended=f"{request.finish_reason}: {request.message}",
            tokens=request.output_ids,
            expected=expected,
            first_difference=first_difference(request.output_ids, expected),
        )


def first_difference(found: list[int], expected: list[int]) -> int:
    """The first index at which two lists differ."""
    size = min(len(found), len(expected))
    different = np.flatnonzero(np.array(found[:size]) != np.array(expected[:size]))
    return int(different[0]) if len(different) else size
