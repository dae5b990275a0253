"""What a step costs, counted in calls: it must not grow with the number of requests that wait."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from trivet.engine import Engine
from trivet.simulation import IdTokenizer, SimulatedExecutor, simple_layers
from trivet_schemas.sampling import SamplingParams

VOCAB, USERS = 1000, 5


def calls_of_a_step(engine: Engine) -> int:
    count = 0

    def look(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # whose callbacks would count
    sys.setprofile(look)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def busy(waiting: int, **options: Any) -> Engine:
    """Four requests run and take every place; the others wait."""
    executor = SimulatedExecutor(
        simple_layers(1, num_kv_heads=1, head_dim=4), vocab_size=VOCAB, max_model_len=512, available_bytes=1 << 30
    )
    roles = {
        "cache": {"use": "paged", "block_size": 4, "num_blocks": 1025, "prefix_caching": False},
        "scheduler": {"use": "continuous", "max_num_seqs": 4, "max_num_batched_tokens": 4096, **options},
    }
    engine = Engine({"model": "none", "plugins": roles}, [executor, IdTokenizer(VOCAB)])
    for number in range(4 + waiting):
        user = str(number % USERS).encode()
        params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        engine.add_request(str(number), [number % VOCAB] * 41, params, priority=3, extra={"user": user})
    for _ in range(4):
        engine.step()
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {"policy": {"use": "priority", "preemption": True}, "victim": "least_priority"},
        {"policy": "shortest_first", "victim": "least_computed"},
        {"policy": "fair_share"},
        {"policy": {"use": "deadline", "default": 9, "preemption": True}},
        {"max_num_mixed_prefill_tokens": 8, "long_prefill_token_threshold": 16},
        {"max_queue_seconds": 3600, "max_num_queued_tokens": 10**9, "max_num_queued_reqs": 10**9},
    ],
    ids=["priority", "shortest_first", "fair_share", "deadline", "mixed", "bounds"],
)
def test_a_step_makes_as_many_calls_however_many_requests_wait(options: dict[str, Any]) -> None:
    few, many = (
        sorted(calls_of_a_step(engine) for _ in range(5))[2]
        for engine in (busy(2 * USERS, **options), busy(5000, **options))
    )
    assert abs(many - few) <= 3


def test_options_that_are_not_set_cost_nothing() -> None:
    """Policies, bounds and paces are asked for only where a configuration has them."""
    plain, limited = (
        sorted(calls_of_a_step(engine) for _ in range(5))[2]
        for engine in (busy(50), busy(50, policy="fair_share", max_num_mixed_prefill_tokens=8))
    )
    assert plain < limited
