"""Requests that share a prompt: children wait for their parent's prompt, share its blocks, and never wait in vain."""

from __future__ import annotations

from typing import Any

import machine_kit as kit
import pytest
from engine_kit import check_free, drain, engine, greedy

from trivet.errors import RequestError
from trivet.testing.fake_model import reference_tokens
from trivet_schemas.sampling import SamplingParams

PROMPT = list(range(1, 22))
FORKING = {"use": "paged", "block_size": 4, "prefix_caching": False}


def family(e: Any, children: int = 3, tokens: int = 6) -> None:
    e.add_request("parent", PROMPT, greedy(tokens))
    for i in range(children):
        e.add_request(f"child{i}", PROMPT, greedy(tokens), parent="parent")


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("how", ["abort", "stop"])
def test_children_go_on_when_their_parent_is_gone(steps: int, how: str) -> None:
    scheduler = {"use": "continuous", "max_num_batched_tokens": 8}
    with engine(cache=FORKING, scheduler=scheduler) as e:
        family(e)
        for _ in range(steps):
            e.step()
        if how == "abort":
            e.abort(["parent"])
        else:
            e.stop("parent", 0)
        done = drain(e, steps=200)
        for i in range(3):
            assert done[f"child{i}"].output_ids == reference_tokens(PROMPT, 6)
        check_free(e)


def test_a_child_that_is_aborted_while_it_waits_leaves_nothing_behind() -> None:
    with engine(cache=FORKING) as e:
        family(e)
        e.abort(["child0", "child2"])
        done = drain(e)
        assert done["child1"].output_ids == reference_tokens(PROMPT, 6)
        check_free(e)


def test_the_id_of_a_parent_that_ended_may_be_taken_by_another_request() -> None:
    """The children's blocks are those of the request that they named, not of its namesake."""
    with engine(cache=FORKING) as e:
        family(e)
        e.abort(["parent"])
        e.add_request("parent", PROMPT[::-1], greedy(20))
        done = drain(e)
        assert done["parent"].output_ids == reference_tokens(PROMPT[::-1], 20)
        for i in range(3):
            assert done[f"child{i}"].output_ids == reference_tokens(PROMPT, 6)


@pytest.mark.parametrize(
    "details", [{"prompt_token_ids": [1, 2]}, {"adapter": "a"}, {"cache_tags": {"image": b"1"}}], ids=str
)
def test_a_parent_with_another_prompt_or_context_is_refused(details: dict[str, Any]) -> None:
    with engine(cache=FORKING) as e:
        e.add_request("parent", PROMPT, greedy(6))
        child = {"prompt_token_ids": PROMPT} | details
        with pytest.raises(RequestError, match="another prompt, adapter or cache tags"):
            e.add_request("child", params=greedy(6), parent="parent", **child)
        drain(e)


def test_a_child_that_wants_prompt_logprobs_computes_its_prompt() -> None:
    with engine(cache=FORKING) as e:
        e.add_request("parent", PROMPT, greedy(6))
        e.add_request("child", PROMPT, greedy(6, prompt_logprobs=0), parent="parent")
        positions: list[int] = []
        while e.has_work:
            for request, chunk in e.step().prompt_logprobs:
                assert request.request_id == "child"
                positions += range(chunk.start, chunk.start + len(chunk.values.ranks))
        assert positions == list(range(1, len(PROMPT)))


def test_a_fork_that_finds_no_memory_leaves_no_copy_in_the_plan() -> None:
    """In some of these pools there is a block for the copy, and none for the drafter's positions behind the prompt."""
    plans: list[Any] = []
    for blocks in range(25, 55, 2):
        cache = FORKING | {"num_blocks": 1 + blocks}
        with engine(kit.Far(), cache=cache, drafter=[{"use": "far"}]) as e:
            e.hooks.run = lambda plan, run=e.hooks.run: plans.append(plan) or run(plan)
            prompt = (PROMPT * 4)[:62]
            e.add_request("parent", prompt, greedy(20))
            e.add_request("other", PROMPT, greedy(12))
            for i in range(2):
                e.add_request(f"child{i}", prompt, greedy(20 + i), parent="parent")
            done = drain(e)
            for name, count in (("parent", 20), ("child0", 20), ("child1", 21)):
                assert done[name].output_ids == reference_tokens(prompt, count)
            check_free(e)
    assert any(new.parent_slot >= 0 for plan in plans for new in plan.new)
    for plan in plans:
        copies = [destination for _, destination in plan.copies[0].tolist()]
        forked = [new for new in plan.new if new.parent_slot >= 0]
        assert len(copies) == len(forked), "a copy belongs to a fork that got in"
        for new in forked:
            assert set(copies) & set(new.blocks[0].tolist())


def test_children_may_be_many() -> None:
    params = [SamplingParams(temperature=1, seed=i, max_tokens=3) for i in range(300)]
    with engine(cache=FORKING) as e:
        e.add_request("c0", PROMPT, params[0])
        for i, own in enumerate(params[1:], 1):
            e.add_request(f"c{i}", PROMPT, own, parent="c0")
        e.abort([f"c{i}" for i in range(100, 200)])
        done = drain(e)
        assert len(done) == 300
        check_free(e)
