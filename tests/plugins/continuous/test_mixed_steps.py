"""Prompts beside rows that decode: chunks, bounds, and a pace that is held."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

import pytest
from engine_kit import drain, engine, greedy

from trivet.engine import Engine
from trivet.plan import StepPlan
from trivet_continuous.options import ContinuousOptions
from trivet_continuous.pacing import PromptShare, StepTimes
from trivet_schemas.config import validate_options
from trivet_schemas.errors import ConfigError

LONG = [i % 64 for i in range(2000)]


class Plans:
    """The plan of every step."""

    def __init__(self, e: Engine) -> None:
        self.engine, self.plans = e, list[StepPlan]()
        inner = e.hooks.schedule

        def keep(inputs: Any) -> StepPlan:
            plan = inner(inputs)
            self.plans.append(plan)
            return plan

        e.hooks.bind("schedule", keep)

    def tokens(self, request_id: str) -> list[int]:
        """What a request that runs got in each step."""
        slot = self.engine.parts.lifecycle.requests[request_id].slot
        return [int(plan.num_scheduled[plan.slots == slot].sum()) for plan in self.plans]


def options(**more: Any) -> dict[str, Any]:
    scheduler = {"use": "continuous", "max_num_batched_tokens": 64, "max_num_seqs": 8} | more
    model = {"use": "fake", "max_model_len": 2048}
    return {"max_model_len": 2048, "model": model, "scheduler": scheduler, "cache": {"use": "paged", "block_size": 4}}


def steps_to_first_token(e: Engine, request: Any, most: int) -> int:
    for step in range(1, most + 1):
        e.step()
        if request.first_token_time is not None:
            return step
    raise AssertionError(f"no token within {most} steps: {e.explain(request.request_id)}")


@pytest.mark.parametrize(("threshold", "most"), [(None, 33), (32, 2)])
def test_a_short_prompt_behind_a_long_one_is_served_within_a_fixed_number_of_steps(
    threshold: int | None, most: int
) -> None:
    with engine(**options(long_prefill_token_threshold=threshold)) as e:
        streams = [e.add_request(f"stream-{i}", [i + 1] * 3, greedy(200)) for i in range(3)]
        for _ in range(3):
            e.step()
        long = e.add_request("long", LONG, greedy(2))
        short = e.add_request("short", [1, 2, 3, 4, 5], greedy(2))
        before = [e.table.num_output(stream) for stream in streams]
        steps = steps_to_first_token(e, short, most)
        after = [e.table.num_output(stream) for stream in streams]
        assert [b - a for a, b in zip(before, after, strict=True)] == [steps] * 3, "decodes advance in every step"
        if threshold:
            assert long.first_token_time is None
        done = drain(e)
        assert {request.finish_reason for request in done.values()} == {"length"}


def test_a_step_that_decodes_has_a_bounded_number_of_prompt_tokens() -> None:
    with engine(**options(max_num_mixed_prefill_tokens=5)) as e:
        plans = Plans(e)
        e.add_request("first", LONG[:100], greedy(60))
        e.step()
        assert plans.plans[-1].num_tokens == 64, "nobody decodes yet"
        e.step()
        e.add_request("second", LONG[:20], greedy(2))
        e.add_request("third", LONG[50:56], greedy(2))
        while e.table.num_running == 1 or e.parts.lifecycle.requests.get("third") is not None:
            e.step()
            plan = plans.plans[-1]
            prompts = int(plan.num_scheduled[plan.num_scheduled > 1].sum())
            assert prompts <= 5, "running and new prompts share the bound"
            assert plan.num_tokens <= 1 + 5 + 2
        drain(e)


def test_the_bound_is_a_reason_to_wait() -> None:
    with engine(**options(max_num_mixed_prefill_tokens=5)) as e:
        e.add_request("stream", [1, 2], greedy(60))
        e.step()
        e.add_request("long", LONG[:100], greedy(2))
        e.add_request("next", LONG[50:90], greedy(2))
        e.step()
        wait = e.explain("next")
        assert wait is not None
        assert wait.kind == "compute"
        assert "prompts have a share of it" in wait.detail
        head = e.parts.scheduler.waits().queue
        assert head is not None
        assert head.detail == wait.detail
        drain(e)


def test_a_prompt_gets_on_however_slow_a_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("trivet_continuous.scheduler.time.perf_counter", lambda: float(next(clock)))
    limits = {"target_inter_token_latency": 1e-3, "min_num_mixed_prefill_tokens": 3}
    with engine(**options(**limits)) as e:
        plans = Plans(e)
        e.add_request("stream", [1, 2], greedy(90))
        for _ in range(10):
            e.step()
        e.add_request("long", LONG[:90], greedy(2))
        for _ in range(12):
            e.step()
        given = plans.tokens("long")[10:]
        assert min(given) == 3
        drain(e)


def play(share: PromptShare, cost: Any, *, decoding: int = 8, steps: int = 60, now: float = 0.0) -> list[int]:
    """Steps of a machine whose steps take ``cost(tokens)``, with a prompt that takes all it may."""
    shares = []
    for _ in range(steps):
        share.tick(now)
        shares.append(share.limit(decoding))
        share.planned(decoding + shares[-1])
        now += cost(decoding + shares[-1])
    return shares


def cpu(tokens: int) -> float:
    return max(0.036, 0.002 * tokens)


def gpu(tokens: int) -> float:
    return 0.010 + 0.00001 * tokens


@pytest.mark.parametrize(("cost", "target"), [(cpu, 0.072), (cpu, 0.2), (gpu, 0.02)])
def test_the_share_finds_the_largest_step_within_the_target(cost: Any, target: float) -> None:
    share = PromptShare(target, 8)
    now = 0.0
    for _ in range(10):  # decoding alone
        share.tick(now)
        share.limit(8)
        share.planned(8)
        now += cost(8)
    shares = play(share, cost, now=now)
    settled = shares[len(shares) // 2 :]
    best = max(tokens for tokens in range(1, 4000) if cost(8 + tokens) <= target)
    assert max(cost(8 + tokens) for tokens in settled) <= 1.25 * target
    assert min(settled) >= 0.6 * best


def test_a_few_slow_steps_change_little() -> None:
    steady, disturbed = StepTimes(), StepTimes()
    for number in range(48):
        tokens = 8 if number % 2 else 24
        steady.observe(tokens, 0.02 + 0.001 * tokens)
        disturbed.observe(tokens, 0.02 + 0.001 * tokens + (1.0 if number % 9 == 0 else 0))
    steady.fit()
    disturbed.fit()
    assert steady.per_token == pytest.approx(0.001)
    assert steady.base == pytest.approx(0.02)
    assert disturbed.per_token == pytest.approx(0.001, rel=0.3)
    assert disturbed.base == pytest.approx(0.02, rel=0.3)


def test_idle_time_is_no_step() -> None:
    share = PromptShare(0.05, 8)
    for start in (0.0, 100.0, 200.0):
        share.tick(start, idle=True)
        share.planned(20)
        share.tick(start + 0.01)
        share.planned(0)
    share.times.fit()
    assert share.times.base == pytest.approx(0.01)


def test_a_plan_that_was_sent_while_another_ran_is_matched_with_its_own_time() -> None:
    share = PromptShare(0.05, 8, lag=1)
    share.tick(0.0)
    share.planned(10)
    share.tick(0.001)  # at once: two steps are in flight
    share.planned(30)
    share.tick(0.010)  # the first has ended
    share.planned(10)
    share.tick(0.040)
    assert list(share.times._tokens) == [10, 30]
    assert list(share.times._seconds) == pytest.approx([0.009, 0.030])


@pytest.mark.parametrize("name", ["max_num_mixed_prefill_tokens", "long_prefill_token_threshold"])
def test_a_bound_above_the_token_budget_is_refused(name: str) -> None:
    assert getattr(ContinuousOptions(max_num_batched_tokens=64, **{name: 64}), name) == 64
    with pytest.raises(ConfigError) as caught:
        validate_options(ContinuousOptions, {"max_num_batched_tokens": 64, name: 65}, "plugins.scheduler")
    rule = "must not exceed max_num_batched_tokens=64, or it has no effect, got 65"
    assert [str(problem) for problem in caught.value.problems] == [f"plugins.scheduler.{name}: {rule}"]
