"""A seed decides the tokens: not the batch, a preemption, a restart, the scheduler, the order of arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import kit
import pytest

from trivet.engine import Engine
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.sampling import SamplingParams

FAMILY = "qwen3"
LENGTH = 20
#: one of each kind: what cuts the vocabulary, what changes the logits, what only shifts them
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.9, "min_p": 0.05, "top_p": 0.95, "top_k": 60},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 1.1, "logit_bias": {7: 2.5, 9: -3.0}},
    {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": [3]},
]


def params(number: int, seed: int) -> SamplingParams:
    return SamplingParams(**SETTINGS[number % len(SETTINGS)], seed=seed, max_tokens=LENGTH, ignore_eos=True)


@contextmanager
def engine(library: Any, **roles: Any) -> Iterator[Engine]:
    config = kit.settings(library.path(FAMILY), FAMILY, block_size=8, budget=64, small=False)
    for role, options in roles.items():
        config["plugins"][role] = {**config["plugins"].get(role, {}), **options}
    built = Engine(config, [FakeTokenizer()])
    try:
        yield built
    finally:
        built.shutdown()


Work = Sequence[tuple[int, list[int], SamplingParams]]


def run(built: Engine, work: Work, *, all_at_once: bool = True) -> tuple[dict[int, list[int]], int]:
    """Tokens by number, and how often a request was preempted."""
    done: dict[int, list[int]] = {}
    preempted = 0
    waiting = list(work)
    while waiting or built.has_work:
        for number, prompt, each in waiting if all_at_once else waiting[:1]:
            built.add_request(str(number), prompt, each)
        del waiting[: len(waiting) if all_at_once else 1]
        for end in built.step().finished:
            assert end.message is None, end.message
            done[int(end.request.request_id)] = end.request.output_ids
            preempted += end.request.num_preemptions
    built.check_integrity()
    return done, preempted


@pytest.fixture(scope="module")
def work() -> Work:
    return [(i, prompt, params(i, 1000 + i)) for i, (prompt, _) in enumerate(kit.make_work(64, seed=5))]


@pytest.fixture(scope="module")
def alone(library: Any, work: Work) -> dict[int, list[int]]:
    """Each request by itself, one after the other."""
    found: dict[int, list[int]] = {}
    with engine(library) as built:
        for item in work:
            found |= run(built, [item])[0]
    return found


def test_in_a_batch_of_64(library: Any, work: Work, alone: dict[int, list[int]]) -> None:
    with engine(library, scheduler={"max_num_seqs": 64}) as built:
        assert run(built, work)[0] == alone


def test_in_another_order_and_arriving_one_by_one(library: Any, work: Work, alone: dict[int, list[int]]) -> None:
    with engine(library) as built:
        assert run(built, work[::-1], all_at_once=False)[0] == alone


def test_after_forced_preemptions(library: Any, work: Work, alone: dict[int, list[int]]) -> None:
    with engine(library, cache={"num_blocks": 1 + kit.LONGEST // 8 + 2}) as built:
        tokens, preempted = run(built, work)
    assert tokens == alone
    assert preempted >= 16, "the pool is so small that requests are preempted all the time"


def test_after_a_restart_in_the_middle(library: Any, work: Work, alone: dict[int, list[int]]) -> None:
    """What was generated before may go on in another engine only as a new prompt; the request itself starts anew."""
    with engine(library) as built:
        for number, prompt, each in work[:20]:
            built.add_request(str(number), prompt, each)
        for _ in range(5):
            built.step()
    with engine(library) as built:
        assert run(built, work)[0] == alone


@pytest.mark.parametrize(
    ("scheduler", "cache"),
    [
        ({"use": "static"}, {}),
        ({}, {"use": "contiguous"}),
        ({"max_num_batched_tokens": 7}, {}),
        ({"policy": "priority", "victim": "least_computed"}, {"num_blocks": 1 + kit.LONGEST // 8 + 2}),
        ({"policy": "shortest_first"}, {}),
    ],
)
def test_with_another_scheduler_or_cache(
    library: Any, work: Work, alone: dict[int, list[int]], scheduler: dict[str, Any], cache: dict[str, Any]
) -> None:
    if scheduler.get("use") == "static":
        scheduler = scheduler | {"max_num_seqs": 24}
    with engine(library, scheduler=scheduler, cache=cache) as built:
        assert run(built, work)[0] == alone


def test_several_steps_in_flight(library: Any, work: Work, alone: dict[int, list[int]]) -> None:
    with engine(library, executor={"use": "inline", "async_scheduling": True}) as built:
        assert run(built, work)[0] == alone


def test_other_seeds_give_other_tokens(library: Any, work: Work, alone: dict[int, list[int]]) -> None:
    with engine(library) as built:
        others = run(built, [(i, prompt, params(i, 5000 + i)) for i, prompt, _ in work])[0]
    assert all(others[i] != alone[i] for i in alone)


def test_outputs_of_one_request_differ_and_follow_from_its_seed(library: Any, work: Work) -> None:
    """Output ``i`` of n = 4 is what a request of its own with ``seed + i`` gives."""
    from trivet import LLM

    prompt = work[10][1]
    with engine(library) as built:
        want = [run(built, [(i, prompt, params(1, 70 + i))])[0][i] for i in range(4)]
    config = kit.settings(library.path(FAMILY), FAMILY, block_size=8, budget=64, small=False)
    with LLM.from_config(config, [FakeTokenizer()]) as llm:
        both = llm.generate([prompt], params(1, 70).replace(n=4, detokenize=False), use_tqdm=False)[0]
    assert [list(output.token_ids) for output in both.outputs] == want
    assert len({tuple(tokens) for tokens in want}) == 4
