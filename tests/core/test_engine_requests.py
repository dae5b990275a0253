"""Requests: what is refused, what runs in which order, what an abort leaves behind, and why something waits."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_kit import FAKE, check_free, drain, engine, expect, greedy, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.engine import Engine
from trivet.errors import CacheMemoryError, OverloadedError, PluginError, RequestError
from trivet.hookspecs import hookimpl
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_schemas.sampling import PoolingParams, SamplingParams

WORK = {str(i): (p, 3 + i % 20) for i, p in enumerate(prompts(24, seed=7))}
SCHEDULERS = [
    {"use": "continuous", "max_num_batched_tokens": 7, "max_num_seqs": 5},
    {"use": "continuous", "max_num_batched_tokens": 64, "max_num_seqs": 64},
    {"use": "continuous", "max_num_batched_tokens": 10_000},
    {"use": "static", "max_num_batched_tokens": 7, "max_num_seqs": 5},
    {"use": "static", "max_num_batched_tokens": 10_000},
]
CACHES: list[dict[str, Any]] = [
    {"use": "paged", "block_size": 1},
    {"use": "paged", "block_size": 8, "num_blocks": 14},
    {"use": "paged", "block_size": 16},
    {"use": "contiguous", "block_size": 4},
    {"use": "contiguous", "block_size": 8, "num_blocks": 26},
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda s: f"{s['use']}-{s['max_num_batched_tokens']}")
@pytest.mark.parametrize("cache", CACHES, ids=lambda c: f"{c['use']}-{c['block_size']}-{c.get('num_blocks', 'ample')}")
def test_tokens_do_not_depend_on_scheduler_or_cache(scheduler: Any, cache: Any) -> None:
    with engine(scheduler=scheduler, cache=cache) as e:
        for request_id, (prompt, count) in WORK.items():
            e.add_request(request_id, prompt, greedy(count))
        expect(drain(e), WORK)
        check_free(e)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_abort_at_any_moment_leaves_no_block_in_use(data: Any) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    cache = data.draw(st.sampled_from(CACHES))
    with engine(cache=cache, scheduler=data.draw(st.sampled_from(SCHEDULERS))) as e:
        alive = dict(list(WORK.items())[: data.draw(st.integers(1, 12))])
        for request_id, (prompt, count) in alive.items():
            e.add_request(request_id, prompt, greedy(count))
        done: dict[str, Any] = {}
        aborted: set[str] = set()
        while e.has_work:
            if rng.random() < 0.2:
                victim = rng.choice(list(alive))
                if victim not in done:
                    aborted.add(victim)
                e.abort([victim])
            for end in e.step().finished:
                done[end.request.request_id] = end.request
            e.check_integrity()
        check_free(e)
        assert set(done) == set(alive)
        assert {i for i, r in done.items() if r.finish_reason == "abort"} == aborted
        expect(done, {i: w for i, w in alive.items() if i not in aborted})


def test_an_abort_of_what_is_not_there_has_no_effect() -> None:
    with engine() as e:
        e.abort(["never"])
        e.add_request("a", [1, 2], greedy(3))
        e.add_request("unscheduled", [1, 2], greedy(3))
        e.abort(["unscheduled"])
        done = drain(e)
        e.abort(["a", "unscheduled"])
        assert not e.has_work
        assert done["a"].output_ids == reference_tokens([1, 2], 3)
        assert done["unscheduled"].finish_reason == "abort"


REFUSED: list[tuple[Any, Any, str]] = [
    ([], greedy(1), "empty"),
    ([1, 64], greedy(1), "token id 64 is outside the vocabulary"),
    ([1, -1], greedy(1), "token id -1 is outside"),
    ([1.5], greedy(1), "list of integers"),
    ([1] * 96, greedy(1), "96 tokens"),
    ([1] * 97, PoolingParams(task="embed"), "97 tokens"),
    ([1], PoolingParams(task="score"), "task 'score'"),
    ([1], greedy(1, stop_token_ids=[64]), "stop_token_ids"),
    ([1], SamplingParams(temperature=0.5, top_p=0.5), "top_p"),
    ([1], greedy(1, logit_bias={3: 1.0}), "logit_bias"),
    ([1], greedy(1, structured_outputs={"regex": "a+"}), "structured_outputs"),
    ([1], {"max_tokens": 3}, "SamplingParams"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), REFUSED)
def test_a_bad_request_is_refused_by_name_and_its_neighbours_finish(prompt: Any, params: Any, message: str) -> None:
    with engine() as e:
        e.add_request("good", [1, 2], greedy(3))
        with pytest.raises(RequestError, match=message):
            e.add_request("bad", prompt, params)
        assert drain(e)["good"].output_ids == reference_tokens([1, 2], 3)
        check_free(e)


def test_a_duplicate_id_is_refused_until_the_first_has_ended() -> None:
    with engine() as e:
        e.add_request("a", [1], greedy(3))
        with pytest.raises(RequestError, match="'a' is in use"):
            e.add_request("a", [2], greedy(3))
        drain(e)
        e.add_request("a", [2], greedy(3))
        assert drain(e)["a"].output_ids == reference_tokens([2], 3)


def test_a_full_queue_is_overload() -> None:
    with engine(scheduler={"use": "continuous", "max_num_queued_reqs": 2}) as e:
        e.add_request("a", [1], greedy(3))
        e.add_request("b", [1], greedy(3))
        with pytest.raises(OverloadedError, match="max_num_queued_reqs = 2"):
            e.add_request("c", [1], greedy(3))
        assert set(drain(e)) == {"a", "b"}


def test_a_pool_too_small_for_one_request_is_refused_at_the_start() -> None:
    cache = {"use": "paged", "block_size": 4, "num_blocks": 17}
    with (
        pytest.raises(CacheMemoryError, match="Set max_model_len to 64") as caught,
        engine(max_model_len=96, cache=cache),
    ):
        pass
    assert caught.value.exit_code == 2


def test_without_a_length_the_context_is_what_the_pool_holds() -> None:
    cache = {"use": "paged", "block_size": 4, "num_blocks": 17}
    with engine(max_model_len=None, cache=cache) as e:
        assert e.max_model_len == 64
        with pytest.raises(RequestError, match="100 tokens"):
            e.add_request("long", [1] * 100, greedy(1))
        e.add_request("short", [1] * 5, greedy(20))
        assert drain(e)["short"].output_ids == reference_tokens([1] * 5, 20)


def test_a_short_prompt_and_running_outputs_are_not_starved_by_a_long_prompt() -> None:
    scheduler = {"use": "continuous", "max_num_batched_tokens": 16}
    with engine(max_model_len=512, scheduler=scheduler) as e:
        e.add_request("running", [3], greedy(60))
        e.step()
        e.add_request("long", [1] * 400, greedy(2))
        e.step()
        e.add_request("short", [2] * 5, greedy(2))
        steps, first = 0, {}
        while e.has_work:
            events = e.step()
            steps += 1
            names = [r.request_id for r in events.requests]
            for name in names:
                first.setdefault(name, steps)
            assert "running" in names or "running" not in e.parts.lifecycle.requests
        assert first["short"] <= 400 // 15 + 3


def test_preemptions_are_bounded_when_the_pool_thrashes() -> None:
    cache = {"use": "paged", "block_size": 4, "num_blocks": 1 + 24}
    scheduler = {"use": "continuous", "max_num_batched_tokens": 8, "max_num_seqs": 16}
    work = {str(i): (p + [5] * 30, 60) for i, p in enumerate(prompts(16, seed=3, longest=6))}
    with engine(cache=cache, scheduler=scheduler) as e:
        for request_id, (prompt, count) in work.items():
            e.add_request(request_id, prompt, greedy(count))
        done = drain(e, steps=3000)
        expect(done, work)
        assert 0 < max(r.num_preemptions for r in done.values()) <= 5
        check_free(e)


def test_explain_says_turn_memory_compute_or_hold_with_numbers() -> None:
    from trivet.context import Hold

    cache = {"use": "paged", "block_size": 4, "num_blocks": 1 + 24}
    scheduler = {"use": "continuous", "max_num_batched_tokens": 16, "max_num_seqs": 2}
    with engine(cache=cache, scheduler=scheduler) as e:
        assert e.explain("nobody") is None
        e.add_request("a", [1] * 60, greedy(20))
        e.add_request("b", [2] * 60, greedy(20))
        e.add_request("c", [1] * 4, greedy(20))
        e.step()
        assert e.explain("a") is None, "it advanced"
        assert (e.explain("b").kind, e.explain("b").numbers) == ("compute", {"token_budget": 16})
        assert (e.explain("c").kind, e.explain("c").numbers) == ("turn", {"ahead": 1})
        for _ in range(5):
            e.step()
        assert (e.explain("b").kind, e.explain("b").numbers["total"]) == ("memory", 24)
        e.context.hold("b", Hold("mine", "test", "because", 0.0))
        assert e.explain("b").kind == "hold"
        assert "because" in e.explain("b").detail
        e.step()
        e.step()
        assert e.explain("c") is None, "a held request does not block the queue"
        e.context.release("b", "test", "mine")
        drain(e)


def test_a_wrapper_can_lower_the_budget_and_hold_requests() -> None:
    seen: list[int] = []

    class Throttle:
        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            inputs.token_budget = 3
            if inputs.step_id < 10:
                inputs.holds["0"] = "not yet"
            plan = yield
            seen.append(plan.num_tokens)
            assert inputs.step_id >= 10 or "0" not in [n.request_id for n in plan.new]
            return plan

    with engine(Throttle()) as e:
        for request_id, (prompt, count) in WORK.items():
            e.add_request(request_id, prompt, greedy(count))
        expect(drain(e), WORK)
    assert max(seen) == 3


def test_stops_are_judged_token_by_token() -> None:
    tokens = reference_tokens([1, 2, 3], 20)
    third = next(t for t in tokens[2:] if t not in tokens[:2])
    at = tokens.index(third)
    with engine(model={"use": "fake", "eos_token_ids": [third]}) as e:
        e.add_request("eos", [1, 2, 3], greedy(20))
        e.add_request("ignore", [1, 2, 3], greedy(20, ignore_eos=True))
        e.add_request("exact", [1, 2, 3], greedy(at + 1))
        done = drain(e)
        assert done["eos"].output_ids == tokens[: at + 1]
        assert (done["eos"].finish_reason, done["eos"].stop_reason) == ("stop", None)
        assert done["ignore"].output_ids == tokens
        assert done["exact"].finish_reason == "stop", "the end of sequence counts on the last allowed token too"
    with engine() as e:
        e.add_request("own", [1, 2, 3], greedy(20, stop_token_ids=[third]))
        done = drain(e)
        assert (done["own"].finish_reason, done["own"].stop_reason) == ("stop", third)


@pytest.mark.parametrize("role", ["scheduler", "cache", "executor", "sampler"])
def test_a_role_without_provider_is_named_with_the_packages_that_offer_one(role: str) -> None:
    settings = {"model": "fake", "plugins": {**FAKE, role: {"use": "gone"}}}
    with pytest.raises(PluginError, match=role):
        Engine(settings, [fakes])
