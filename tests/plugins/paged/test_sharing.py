"""Requests with one beginning at once: one computes it, the rest wait for that and never in vain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import machine_kit as kit
import numpy as np
import pytest
from engine_kit import check_free, drain, engine, greedy

from trivet.context import Hold
from trivet.hookspecs import hookimpl
from trivet.state import Request, RequestTable
from trivet.testing.fake_model import reference_tokens
from trivet_paged.sharing import PrefixSharing
from trivet_schemas.sampling import SamplingParams

PREFIX = [(7 * i) % 64 for i in range(48)]
PAGED = {"use": "paged", "block_size": 4}
WIDE = {"use": "continuous", "max_num_batched_tokens": 16, "max_num_seqs": 32}


def submit(e: Any, count: int, tokens: int = 4, **details: Any) -> dict[str, list[int]]:
    prompts = {f"r{i}": [*PREFIX, 1 + i % 60, 2] for i in range(count)}
    for name, prompt in prompts.items():
        e.add_request(name, prompt, greedy(tokens), **details)
    return prompts


def computed(e: Any) -> list[int]:
    """Counts the tokens that are computed from now on, step by step."""
    counts: list[int] = []
    e.hooks.run, run = lambda plan: counts.append(plan.num_tokens) or run(plan), e.hooks.run
    return counts


def check(done: dict[str, Any], prompts: dict[str, list[int]], tokens: int = 4) -> None:
    for name, prompt in prompts.items():
        assert done[name].output_ids == reference_tokens(prompt, tokens), done[name].message


@pytest.mark.parametrize("budget", [16, 7, 1000])
def test_sixteen_at_once_compute_their_prefix_once(budget: int) -> None:
    with engine(cache=PAGED, scheduler=WIDE | {"max_num_batched_tokens": budget}) as e:
        counts = computed(e)
        prompts = submit(e, 16)
        check(drain(e), prompts)
        own = 2 + 3  # tokens of the prompt behind the prefix, and outputs that are computed
        assert sum(counts) == len(PREFIX) + 16 * own
        check_free(e)


def test_the_reason_names_who_computes_what() -> None:
    waits: list[Any] = []
    with engine(cache=PAGED, scheduler=WIDE | {"max_num_batched_tokens": 100}) as e:
        run = e.hooks.run
        e.hooks.run = lambda plan: waits.append([e.explain(f"r{i}") for i in range(3)]) or run(plan)
        submit(e, 3)
        drain(e)
    leader, *others = waits[0]
    assert leader is None
    for wait in others:
        assert wait.kind == "hold"
        assert "its tokens 0 to 47 are being computed or loaded by r0" in wait.detail
    assert waits[1] == [None] * 3, "they run as soon as it is there"


class Context:
    """As much of an engine as :class:`PrefixSharing` asks for."""

    def __init__(self) -> None:
        self.table = RequestTable(4, 100)
        self.held: dict[str, Hold] = {}

    def hold(self, request_id: str, hold: Hold) -> None:
        self.held[request_id] = hold

    def release(self, request_id: str, plugin: str, kind: str) -> None:
        assert (self.held[request_id].plugin, self.held[request_id].kind) == (plugin, kind)
        del self.held[request_id]

    def run(self, name: str) -> int:
        slot = self.table.assign(Request(name, np.ones(40, np.int32), None, 60, 0), (), 0)
        self.table.in_flight[slot] = 1
        return slot


CHAIN = [bytes([i]) * 32 for i in range(10)]


def waiting(context: Any, shared: int) -> PrefixSharing:
    """A leader in slot ``context.leader`` computes ten blocks; ``w`` waits for the first ``shared`` of them."""
    sharing = PrefixSharing(context, 4)
    context.leader = context.run("leader")
    sharing.lead(context.leader, CHAIN, 0)
    other = Request("w", np.ones(1, np.int32), None, 60, 0)
    assert sharing.wait(other, [*CHAIN[:shared], b"own"], 0, 4 * shared + 5)
    return sharing


def test_those_who_wait_need_not_wait_for_more_than_they_share() -> None:
    context = Context()
    sharing = waiting(context, 3)
    sharing.advanced([context.leader], [2])
    assert context.held
    sharing.advanced([context.leader], [3])
    assert not context.held
    sharing.check_integrity()


def test_who_leads_no_more_is_not_waited_for() -> None:
    context = Context()
    sharing = waiting(context, 3)
    sharing.leave(context.leader)
    assert not context.held
    other = Request("x", np.ones(1, np.int32), None, 60, 0)
    assert not sharing.wait(other, CHAIN, 0, 41)


def test_a_leader_that_stands_still_is_not_waited_for() -> None:
    context = Context()
    sharing = waiting(context, 3)
    sharing.sweep()
    assert context.held
    context.table.in_flight[context.leader] = 0
    other = Request("x", np.ones(1, np.int32), None, 60, 0)
    assert not sharing.wait(other, CHAIN, 0, 41), "nobody joins"
    sharing.sweep()
    assert not context.held, "and those who are there go on"


def test_a_leader_whose_blocks_are_being_loaded_is_waited_for() -> None:
    context = Context()
    sharing = waiting(context, 3)
    context.table.in_flight[context.leader] = 0
    sharing.loading.add(context.leader)
    sharing.sweep()
    assert context.held
    sharing.loading.discard(context.leader)
    sharing.sweep()
    assert not context.held


def test_a_small_common_part_is_not_waited_for() -> None:
    with engine(cache=PAGED, scheduler=WIDE) as e:
        e.add_request("a", PREFIX, greedy(2))
        e.add_request("b", PREFIX[:8] + list(range(40)), greedy(2))
        e.step()
        assert not e.parts.lifecycle.requests["b"].holds
        drain(e)


@pytest.mark.parametrize("how", ["adapter", "cache_salt", "cache_tags"])
def test_another_context_is_not_waited_for(how: str) -> None:
    with engine(cache=PAGED, scheduler=WIDE | {"max_num_batched_tokens": 100}) as e:
        counts = computed(e)
        for i in range(4):
            params = SamplingParams(max_tokens=1, temperature=0, cache_salt=f"s{i}" if how == "cache_salt" else None)
            details: dict[str, Any] = {"adapter": f"a{i}"} if how == "adapter" else {}
            if how == "cache_tags":
                details = {"cache_tags": {"image": bytes([i])}}
            e.add_request(f"r{i}", PREFIX, params, **details)
        e.step()
        assert not any(request.holds for request in e.parts.lifecycle.requests.values())
        drain(e)
        assert sum(counts) == 4 * len(PREFIX)
        assert e.parts.cache.stats().prefix_hits == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("how", ["abort", "stop", "hold"])
def test_nobody_waits_for_a_leader_that_is_gone(how: str, steps: int) -> None:
    with engine(cache=PAGED, scheduler=WIDE) as e:
        prompts = submit(e, 6)
        for _ in range(steps):
            e.step()
        if how == "abort":
            e.abort("r0")
        elif how == "stop":
            e.stop("r0", 0)
        else:
            e.context.hold("r0", Hold("k", "test", "a while", 0.0))
        done: dict[str, Any] = {}
        for _ in range(60):
            done |= {end.request.request_id: end.request for end in e.step().finished}
        others = {name: prompt for name, prompt in prompts.items() if name != "r0"}
        check(done, others)
        if how == "hold":
            e.context.release("r0", "test", "k")
        done |= drain(e)
        if how == "hold":
            check(done, prompts)
        check_free(e)


def test_nobody_waits_for_a_leader_that_was_preempted() -> None:
    with engine(cache=PAGED, scheduler=WIDE) as e:
        prompts = submit(e, 6)
        e.step()
        leader = e.parts.lifecycle.requests["r0"]
        e.parts.lifecycle.preempt(leader.slot)
        assert leader.slot == -1
        check(drain(e, steps=200), prompts)


def test_nobody_waits_for_a_leader_that_a_wrapper_keeps_out() -> None:
    class Keeps:
        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Iterator[None]:
            if inputs.step_id > 1 and inputs.step_id < 80:
                inputs.holds["r0"] = "not now"
            return (yield)

    with engine(Keeps(), cache=PAGED, scheduler=WIDE) as e:
        prompts = submit(e, 5)
        done: dict[str, Any] = {}
        for _ in range(60):
            done |= {end.request.request_id: end.request for end in e.step().finished}
        check(done, {name: prompt for name, prompt in prompts.items() if name != "r0"})
        check(done | drain(e), prompts)


def test_nobody_waits_for_a_leader_whose_grammar_compiles() -> None:
    with engine(kit, cache=PAGED, scheduler=WIDE, grammar=[{"use": "parity"}], executor={"use": "held"}) as e:
        params = SamplingParams(temperature=0, max_tokens=6, structured_outputs={"regex": "alternating:6"})
        e.add_request("r0", PREFIX, params)
        for i in range(1, 5):
            e.add_request(f"r{i}", PREFIX, greedy(4))
        done = drain(e, steps=200)
        assert len(done["r0"].output_ids) == 6
        check(done, {f"r{i}": PREFIX for i in range(1, 5)})


def test_nobody_waits_for_a_leader_that_fails() -> None:
    class FailsOnce:
        failed = False

        @hookimpl(wrapper=True)
        def trivet_forward(self, batch: Any) -> Iterator[None]:
            if not self.failed:
                self.failed = True
                raise RuntimeError("no memory")
            return (yield)

    with engine(FailsOnce(), cache=PAGED, scheduler=WIDE | {"max_num_batched_tokens": 100}) as e:
        prompts = submit(e, 4)
        done = drain(e, steps=200)
        assert done["r0"].finish_reason == "error"
        del prompts["r0"]
        check(done, prompts)
        check_free(e)


def test_three_hundred_sharers() -> None:
    with engine(cache=PAGED, scheduler={"use": "continuous", "max_num_batched_tokens": 64, "max_num_seqs": 16}) as e:
        counts = computed(e)
        prompts = submit(e, 300, tokens=2)
        done = drain(e, check=False)
        check(done, {name: prompts[name] for name in ("r0", "r1", "r59", "r150", "r299")}, tokens=2)
        assert len(done) == 300
        # With r0 and its like (60 different prompts), a prompt found again computes its last block only.
        assert sum(counts) <= len(PREFIX) + 300 * 3
        check_free(e)


def test_without_a_prefix_cache_nobody_waits() -> None:
    with engine(cache=PAGED | {"prefix_caching": False}, scheduler=WIDE | {"max_num_batched_tokens": 500}) as e:
        counts = computed(e)
        prompts = submit(e, 4)
        e.step()
        assert not any(request.holds for request in e.parts.lifecycle.requests.values())
        check(drain(e), prompts)
        assert sum(counts) == 4 * (len(PREFIX) + 5)
