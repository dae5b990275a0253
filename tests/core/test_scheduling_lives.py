"""Random lives under every policy, victim, bound and way of running steps: whoever is next and whoever makes room, each
request gets the tokens that it gets alone, every step that it waits has a reason, and the sums of its story add up."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import test_engine_machine as machine
import test_history as history

from trivet_schemas.sampling import SamplingParams

POLICIES: list[Any] = [
    "fcfs",
    "priority",
    {"use": "priority", "preemption": True},
    "shortest_first",
    {"use": "shortest_first", "measure": "total", "ageing": 1},
    "fair_share",
    {"use": "fair_share", "shares": {"u1": 3.0}},
    "deadline",
    {"use": "deadline", "preemption": True, "default": 5.0},
]
VICTIMS = ["newest", "least_priority", "least_computed", "most_blocks"]
BOUNDS: dict[str, list[Any]] = {
    "max_num_mixed_prefill_tokens": [1, 3, 20],
    "target_inter_token_latency": [1e-9, 1e-4, 10.0],
    "long_prefill_token_threshold": [1, 4],
    "max_num_queued_reqs": [1, 5],
    "max_num_queued_tokens": [1, 40],
    "max_queue_seconds": [1e-9, 1e-3, 0.05, 100.0],
    "max_recomputed_share": [0, 0.05, 1],
}
WITHIN_THE_BUDGET = {"max_num_mixed_prefill_tokens", "long_prefill_token_threshold"}
EXECUTORS: list[dict[str, Any]] = [
    {"use": "inline"},
    {"use": "inline", "async_scheduling": True},
    *({"depth": depth, "mode": mode, "feedback": feed} for depth, mode, feed in [(1, "lazy", True), (2, "lazy", True)]),
    *({"depth": 3, "mode": mode, "wire": mode == "eager"} for mode in ("eager", "lazy", "thread")),
    {"depth": 3, "mode": "lazy", "feedback": False},
]


MOST_PREEMPTIONS = 12


class Life(history.Watched):
    """Requests say everything of themselves that a policy asks for."""

    rng: random.Random

    def add(self, prompt: list[int], params: Any, **details: Any) -> Any:
        rng = self.rng
        extra = {"user": rng.choice([b"u1", b"u2", b"u3"]), "deadline": rng.choice([b"0.01", b"5", b"1e3"])}
        said = {
            "priority": rng.randint(-2, 3),
            "arrival_time": rng.choice([0.0, -1e9, 1e12, time.monotonic()]),
            "extra": {name: value for name, value in extra.items() if rng.random() < 0.7},
        }
        chosen = {name: value for name, value in said.items() if rng.random() < 0.6}
        return super().add(prompt, params, **(chosen | details))

    def storm(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(2, 6)):
            prompt = [rng.randrange(64) for _ in range(rng.randint(1, 6))]
            tokens, heat = rng.randint(8, 30), rng.choice([0, 0, 1])
            self.add(prompt, SamplingParams(temperature=heat, seed=rng.randrange(9), max_tokens=tokens))

    def finish(self) -> None:
        self.release()
        self.chaos.armed.clear()
        self.chaos.token_budget = self.chaos.max_num_seqs = None
        self.chaos.holds = {}
        for _ in range(4000):
            if not self.engine.has_work:
                break
            self.one_step()
        else:
            pytest.fail(str({name: self.engine.explain(name) for name in self.engine.parts.lifecycle.requests}))
        # The canary may wait for longer.
        scheduler: Any = self.engine.parts.scheduler
        scheduler._expiring.clear()
        scheduler._options = scheduler._options.model_copy(update={"max_queue_seconds": None})
        super().finish()
        for wanted in self.all:
            request = wanted.request
            assert wanted.ends[0] != "error" or request.message
            # Each return asks for twice as much room, up to all that the request may become.
            assert request.num_preemptions <= MOST_PREEMPTIONS, request.request_id


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Idle turns take no time worth mentioning, and faults are not logged."""
    monkeypatch.setattr("trivet.worker.step_runner._PATIENCE", 0.0001)
    monkeypatch.setattr("trivet.engine._IDLE_SECONDS", 0.0001)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def live(seed: int, rules: int) -> None:
    rng = random.Random(seed)
    life: Any = Life()
    life.rng = rng
    scheduler: dict[str, Any] = {
        "use": "continuous",
        "max_num_batched_tokens": rng.choice([1, 2, 7, 64]),
        "max_num_seqs": rng.choice([1, 3, 4, 8]),
        "policy": rng.choice(POLICIES),
        "victim": rng.choice(VICTIMS),
    } | {name: rng.choice(values) for name, values in BOUNDS.items() if rng.random() < 0.25}
    for name in WITHIN_THE_BUDGET & scheduler.keys():
        scheduler[name] = min(scheduler[name], scheduler["max_num_batched_tokens"])
    executor = rng.choice(EXECUTORS)
    machine.start_at_random(life, rng, rng.choice(machine.MEMORIES[:4] + machine.MEMORIES), scheduler, executor)
    life.choose(rng.choice([1, 4, 30, 4096]))
    if executor.get("use") == "inline":
        life.executor.runner = life.executor._runner
    machine.drive(life, rng, rules, [life.storm] * 3)


@pytest.mark.parametrize("seed", range(24))
def test_lives_under_every_policy(seed: int) -> None:
    live(seed, 35)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_lives_under_every_policy(seed: int) -> None:
    live(seed, 60)
