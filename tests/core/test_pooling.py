"""What is pooled of a prompt does not depend on chunks, caches, preemptions and steps that are undone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from engine_kit import check_free, config, engine, greedy

from trivet import AsyncEngine, ParameterError, PoolingParams, RequestFault
from trivet.engine import Engine
from trivet.hookspecs import hookimpl
from trivet.testing import fakes
from trivet.testing.fake_model import reference_states, reference_tokens
from trivet.worker.pooling import activate

SHARED = [7, 8, 9, 10] * 4
KINDS = ("last", "cls", "mean")


def reference(prompt: list[int], kind: str) -> float:
    """The pooled state of the fake model, whose states are one number."""
    states = (reference_states(prompt, (None,)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return float({"last": states[-1], "cls": states[0], "mean": states.mean()}[kind])


def work(seed: int, count: int) -> list[tuple[str, list[int], Any]]:
    """Requests that pool in every way, and some that generate, with beginnings in common."""
    rng = random.Random(seed)
    made: list[tuple[str, list[int], Any]] = []
    for index in range(count):
        prompt = SHARED[: rng.choice([0, 8, 16])] + [rng.randrange(64) for _ in range(rng.randint(1, 30))]
        if rng.random() < 0.4:
            made.append((f"g{index}", prompt, greedy(20)))
        else:
            made.append((f"p{index}", prompt, PoolingParams(pooling_type=rng.choice(KINDS))))
    return made


def run(e: Engine, requests: list[tuple[str, list[int], Any]]) -> tuple[dict[str, Any], dict[str, float]]:
    """Ended requests, and what was pooled."""
    for request_id, prompt, params in requests:
        e.add_request(request_id, prompt, params)
    done: dict[str, Any] = {}
    pooled: dict[str, float] = {}
    while e.has_work:
        events = e.step()
        for request, one in events.pooled:
            assert request.request_id not in pooled, "a request is pooled once"
            pooled[request.request_id] = float(one.data[0])
        done |= {end.request.request_id: end.request for end in events.finished}
    check_free(e)
    return done, pooled


def check(requests: list[tuple[str, list[int], Any]], done: dict[str, Any], pooled: dict[str, float]) -> None:
    for request_id, prompt, params in requests:
        if isinstance(params, PoolingParams):
            assert pooled[request_id] == pytest.approx(reference(prompt, params.pooling_type or "last"), abs=1e-6)
        else:
            assert done[request_id].output_ids == reference_tokens(prompt, 20)


@pytest.mark.parametrize("budget", [3, 11, 64])
@pytest.mark.parametrize("blocks", [24, 200])
def test_any_chunks_and_caches_pool_the_same(budget: int, blocks: int) -> None:
    scheduler = {"use": "continuous", "max_num_batched_tokens": budget, "max_num_seqs": 6 if budget > 6 else 3}
    if budget == 64:
        scheduler["long_prefill_token_threshold"] = 4
    cache = {"use": "paged", "block_size": 4, "num_blocks": blocks}
    requests = work(budget, 40)
    with engine(max_model_len=72, scheduler=scheduler, cache=cache) as e:
        done, pooled = run(e, requests)
        check(requests, done, pooled)
        if (budget, blocks) == (64, 24):
            assert any(done[i].num_preemptions for i in pooled), "a prompt lost its blocks half-way"
        if blocks == 200:
            found = {i: done[i].num_cached_tokens for i, _, p in requests if isinstance(p, PoolingParams)}
            kinds = {i: p.pooling_type for i, _, p in requests if isinstance(p, PoolingParams)}
            assert any(n for i, n in found.items() if kinds[i] == "last")
            assert not any(n for i, n in found.items() if kinds[i] != "last")


def test_a_step_that_is_undone_counts_once() -> None:
    class Failing:
        steps = 0

        @hookimpl(wrapper=True)
        def trivet_forward(self, batch: Any) -> Any:
            self.steps += 1
            output = yield
            if self.steps == 2:
                raise RequestFault({"bad": "no luck"})
            return output

    with engine(Failing(), scheduler={"use": "continuous", "max_num_batched_tokens": 12, "max_num_seqs": 4}) as e:
        prompt = list(range(31))
        requests = [("bad", [1, 2], greedy(9)), ("mean", prompt, PoolingParams(pooling_type="mean"))]
        done, pooled = run(e, requests)
    assert (done["bad"].finish_reason, done["bad"].message) == ("error", "no luck")
    assert pooled["mean"] == pytest.approx(reference(prompt, "mean"), abs=1e-6)


@pytest.mark.parametrize(
    ("problem_type", "scores", "expected"),
    [
        (None, [0.0, 0.0, 0.0], [1 / 3] * 3),
        (None, [1000.0, 0.0], [1.0, 0.0]),
        (None, [0.0], [0.5]),
        (None, [-1000.0], [0.0]),
        ("single_label_classification", [np.log(3.0), 0.0], [0.75, 0.25]),
        ("multi_label_classification", [np.log(3.0), 0.0], [0.75, 0.5]),
        ("regression", [2.5], [2.5]),
    ],
)
def test_scores_become_what_their_kind_asks_for(problem_type: str | None, scores: list[float], expected: Any) -> None:
    made = activate(np.array(scores, np.float32), problem_type)
    np.testing.assert_allclose(made, expected, atol=1e-6)
    assert made.dtype == np.float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pooling_type": "max"}, "pooling_type"),
        ({"task": "classify", "pooling_type": "mean"}, "is for task='embed' only, got 'mean' with task='classify'"),
        ({"use_activation": False}, "is for task='score' and 'classify' only"),
        ({"task": "score", "normalize": True}, "is for task='embed' only"),
        ({"dimensions": 0}, "dimensions: must be at least 1"),
    ],
)
def test_parameters_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        PoolingParams(**values)


@pytest.mark.asyncio
async def test_a_serving_engine_pools_the_same() -> None:
    async with AsyncEngine(config(), [fakes]) as serving:
        for kind in KINDS:
            output = await serving.encode(SHARED, PoolingParams(pooling_type=kind))  # type: ignore[arg-type]
            assert output.outputs.data.tolist() == [pytest.approx(reference(SHARED, kind), abs=1e-6)]
