"""Random lives of an engine: whatever happens in whatever order, every request gets the tokens it gets alone, ends
once, and leaves nothing behind."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import drafting
import machine_kit as kit
import numpy as np
import pytest
from engine_kit import FAKE
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from machine_oracle import VOCAB, Wanted

from trivet.context import Hold
from trivet.engine import Engine
from trivet.errors import OverloadedError
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_schemas.sampling import PoolingParams, SamplingParams

MAX_LEN = 40
CACHES: list[dict[str, Any]] = [
    {"use": "paged", "block_size": 1, "num_blocks": 1 + MAX_LEN},
    {"use": "paged", "block_size": 3, "num_blocks": 1 + 16},
    {"use": "paged", "block_size": 4, "num_blocks": 1 + 24},
    {"use": "paged", "block_size": 64, "num_blocks": 1 + 3},
    {"use": "paged", "block_size": 4},
    {"use": "contiguous", "block_size": 4, "num_blocks": 1 + 25},
    {"use": "paged", "block_size": 4, "num_blocks": 1 + 2000},
    {"use": "paged", "block_size": 5},
    {"use": "paged", "block_size": 4, "num_blocks": 1 + 20, "prefix_caching": False},
    {"use": "paged", "block_size": 1, "prefix_caching": False},
    {"use": "paged", "block_size": 5, "prefix_caching": False},
]
#: for models with windows; the small pools hold one request of the greatest length and little more
WINDOWED: list[dict[str, Any]] = [
    {"use": "paged", "block_size": 4, "num_blocks": 1 + 36},
    {"use": "paged", "block_size": 1, "num_blocks": 1 + 140},
    {"use": "paged", "block_size": 5},
    {"use": "paged", "block_size": 4, "num_blocks": 1 + 36, "prefix_caching": False},
    {"use": "paged", "block_size": 3, "prefix_caching": False},
]
MEMORIES: list[tuple[list[int | None], dict[str, Any]]] = [
    *(([None], cache) for cache in CACHES),
    *(([None, 5, None], cache) for cache in WINDOWED),
    *(([5], cache) for cache in WINDOWED),
]
SCHEDULERS: list[dict[str, Any]] = [
    {"use": "continuous", "max_num_batched_tokens": 7, "max_num_seqs": 4},
    {"use": "continuous", "max_num_batched_tokens": 1, "max_num_seqs": 3},
    {"use": "continuous", "max_num_batched_tokens": 64, "max_num_seqs": 1},
    {"use": "continuous", "max_num_batched_tokens": 64, "max_num_seqs": 8},
    {"use": "static", "max_num_batched_tokens": 7, "max_num_seqs": 4},
    {"use": "static", "max_num_batched_tokens": 1000, "max_num_seqs": 8},
]
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 1 + 5 * i % 29).tolist() for i in range(12)]


WHO = st.integers(0, 30)


class Life(RuleBasedStateMachine):
    """Rules are what users and plugins may do; after each step the engine's state must be consistent."""

    @initialize(
        memory=st.sampled_from(MEMORIES),
        scheduler=st.sampled_from(SCHEDULERS),
        executor=st.fixed_dictionaries(
            {
                "depth": st.sampled_from([1, 2, 3]),
                "feedback": st.sampled_from([True, True, False]),
                "mode": st.sampled_from(["lazy", "eager"]),
                "wire": st.booleans(),
            }
        ),
        drafts=st.sampled_from([None, "random_tree", "far"]),
        transfers=st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {"load": st.sampled_from([0, 1, 3]), "store": st.sampled_from([0, 1, 2]), "seed": st.integers(0, 99)}
            ),
        ),
        eos=st.sampled_from([(), (7,), (5, 33)]),
    )
    def start(self, memory: Any, scheduler: Any, executor: Any, drafts: str | None, transfers: Any, eos: Any) -> None:
        windows, cache = memory
        self.windows, self.eos = windows, frozenset(eos)
        roles = FAKE | {
            "model": {"use": "fake", "windows": windows, "eos_token_ids": list(eos)},
            "executor": {"use": "held"} | executor,
            "cache": cache,
            "scheduler": scheduler,
            "grammar": [{"use": "parity"}],
        }
        plugins = [fakes, kit]
        if drafts is not None:
            roles["drafter"] = [{"use": drafts}]
            plugins.append(drafting if drafts == "random_tree" else kit.Far())
        if transfers is not None and len(windows) == 1:
            roles["connector"] = {"use": "depot"} | transfers
        config = {"model": "fake", "max_model_len": MAX_LEN, "plugins": roles}
        self.chaos = kit.Chaos()
        self.engine = Engine(config, [*plugins, self.chaos, kit.Touchy()])
        self.executor = self.engine.context.get("executor")
        self.chaos.cache, self.chaos.groups = self.engine.parts.cache, self.engine.parts.layout.groups
        self.all: list[Wanted] = []
        self.held: dict[str, Wanted] = {}
        self.count = self.refused = 0

    # ------------------------------------------------------------------ requests come

    def add(self, prompt: list[int], params: Any, **details: Any) -> Wanted:
        self.count += 1
        name = f"r{self.count}"
        wanted = Wanted(name, prompt, params, self.windows, self.eos, details.get("adapter"))
        wanted.request = self.engine.add_request(name, prompt, params, **details)
        self.all.append(wanted)
        return wanted

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        tokens=st.integers(1, 10),
        fields=st.fixed_dictionaries(
            {},
            optional={
                "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=6),
                "ignore_eos": st.booleans(),
                "temperature": st.sampled_from([0.5, 1.5]),
                "seed": st.integers(-(2**63), 2**63 - 1),
                "logprobs": st.integers(0, 2),
                "prompt_logprobs": st.integers(0, 2),
            },
        ),
        adapter=st.sampled_from([None, None, None, "a", "b"]),
        salt=st.sampled_from([None, None, "salt"]),
    )
    def add_plain(self, prompt: int, tokens: int, fields: Any, adapter: str | None, salt: str | None) -> None:
        params = SamplingParams(**({"temperature": 0} | fields | {"max_tokens": tokens, "cache_salt": salt}))
        self.add(PROMPTS[prompt], params, adapter=adapter)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), spare=st.integers(0, 2))
    def add_long(self, prompt: int, spare: int) -> None:
        tokens = (PROMPTS[prompt] * MAX_LEN)[: MAX_LEN - 1 - spare]
        self.add(tokens, SamplingParams(temperature=0, max_tokens=None))

    @rule(prompt=st.integers(0, len(PROMPTS) - 1))
    def add_pooling(self, prompt: int) -> None:
        self.add(PROMPTS[prompt], PoolingParams(task="embed"))

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        kind=st.sampled_from(["alternating", "forcing", "nonsense"]),
        limit=st.integers(1, 12),
        tokens=st.integers(1, 12),
        temperature=st.sampled_from([0, 1]),
    )
    def add_structured(self, prompt: int, kind: str, limit: int, tokens: int, temperature: float) -> None:
        constraint = {"regex": f"{kind}:{limit}"}
        params = SamplingParams(temperature=temperature, max_tokens=tokens, structured_outputs=constraint)
        self.add(PROMPTS[prompt], params)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), children=st.integers(1, 3), tokens=st.integers(1, 8))
    def add_family(self, prompt: int, children: int, tokens: int) -> None:
        params = [SamplingParams(temperature=1, max_tokens=tokens, seed=i) for i in range(children + 1)]
        parent = self.add(PROMPTS[prompt], params[0])
        for own in params[1:]:
            self.add(PROMPTS[prompt], own, parent=parent.request_id)

    @rule(who=WHO)
    def add_child(self, who: int) -> None:
        parent = pick(who, self.alive())
        if parent is None:
            return
        if not isinstance(parent.params, PoolingParams):
            tags = {"cache_salt": parent.params.cache_salt} if parent.params.cache_salt else {}
            params = SamplingParams(temperature=0, max_tokens=5, **tags)
            self.add(parent.prompt, params, parent=parent.request_id, adapter=parent.adapter)

    # ------------------------------------------------------------------ requests go

    def alive(self) -> list[Wanted]:
        return [w for w in self.all if w.unfinished and w.asked is None]

    @rule(who=st.lists(WHO, min_size=1, max_size=3))
    def abort(self, who: list[int]) -> None:
        victims = [victim for one in who if (victim := pick(one, self.all)) is not None]
        self.engine.abort([*(v.request_id for v in victims), "stranger"])
        for victim in victims:
            if victim.unfinished and victim.asked is None and victim.request.finish_reason == "abort":
                victim.asked = ("abort", 0)

    @rule(who=WHO, back=st.integers(0, 3))
    def stop(self, who: int, back: int) -> None:
        victim = pick(who, [w for w in self.alive() if w.streamed])
        if victim is not None and victim.request.finish_reason is None:
            count = max(len(victim.streamed) - back, 1)
            self.engine.stop(victim.request_id, count, "a text")
            victim.asked = ("stop", count)
            assert len(victim.request.output_ids) == count

    # ------------------------------------------------------------------ plugins interfere

    @rule(who=WHO, kind=st.sampled_from(["x", "y"]))
    def hold(self, who: int, kind: str) -> None:
        victim = pick(who, self.alive())
        if victim is not None:
            self.engine.context.hold(victim.request_id, Hold(kind, "test", "a test", 0.0))
            self.held[victim.request_id] = victim

    @rule()
    def release(self) -> None:
        for name in self.held:
            self.engine.context.release(name, "test", "x")
            self.engine.context.release(name, "test", "y")
        self.held.clear()

    @rule(
        budget=st.sampled_from([None, None, -3, 0, 1, 5, 10**6]),
        seqs=st.sampled_from([None, None, 0, 1, 10**6]),
        who=st.lists(WHO, max_size=3),
    )
    def throttle(self, budget: int | None, seqs: int | None, who: list[int]) -> None:
        self.chaos.token_budget, self.chaos.max_num_seqs = budget, seqs
        some = [victim.request_id for one in who if (victim := pick(one, self.alive())) is not None]
        self.chaos.holds = dict.fromkeys(some, "not now")

    @rule(phase=st.sampled_from(kit.PHASES), plain=st.booleans(), who=st.lists(WHO, min_size=1, max_size=3))
    def arm(self, phase: str, plain: bool, who: list[int]) -> None:
        names = [victim.request_id for one in who if (victim := pick(one, self.alive())) is not None]
        self.chaos.armed[phase] = RuntimeError("chaos") if plain or not names else kit.fault_of(names)

    @rule()
    def refuse(self) -> None:
        self.executor.refuse = 1

    # ------------------------------------------------------------------ time passes

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        engine = self.engine
        if not engine.has_work:
            return
        by_request = {id(w.request): w for w in self.all}
        self.chaos.advanced.clear()
        held = {name for name, request in engine.parts.lifecycle.requests.items() if request.holds}
        events = engine.step()
        assert engine.fault is None
        for i, request in enumerate(events.requests):
            by_request[id(request)].streamed += events.tokens.row(i).tolist()
        for i, values in events.logprobs:
            tokens = events.tokens.row(i).tolist()
            assert values.token_ids[:, 0].tolist() == tokens[: len(values.ranks)]
            assert values.token_ids.shape == values.logprobs.shape
        for request, chunk in events.prompt_logprobs:
            wanted = by_request[id(request)]
            for i, row in enumerate(chunk.values.logprobs.tolist()):
                known = wanted.prompt_logprobs.setdefault(chunk.start + i, row)
                assert known == pytest.approx(row), "a position computed again gives the same"
        for request, pooled in events.pooled:
            by_request[id(request)].pooled.append(pooled.data)
        for end in events.finished:
            by_request[id(end.request)].ends.append(end.reason)
        engine.check_integrity()
        self.executor.check_integrity()
        ledger = engine.parts.cache._ledger
        for plan, _, _ in engine._flying:
            blocks = self.chaos.blocks[plan.step_id]
            needed = ledger._used[blocks] + ledger._retired[blocks] + ledger._leased[blocks]
            assert needed.all(), f"blocks of step {plan.step_id}, which is in flight, are free"
        for name, request in engine.parts.lifecycle.requests.items():
            # A hold from before may have ended with this very step.
            if name not in held and (request.slot, request.epoch) not in self.chaos.advanced | in_flight(engine):
                assert engine.explain(name) is not None, f"{name} waits without a reason"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.finish()
        finally:
            self.engine.shutdown()

    def finish(self) -> None:
        engine, life = self.engine, self.engine.parts.lifecycle
        self.release()
        self.chaos.armed.clear()
        self.chaos.token_budget = self.chaos.max_num_seqs = None
        self.chaos.holds = {}
        self.executor.refuse = 0
        steps = 0
        while engine.has_work:
            self.one_step()
            steps += 1
            assert steps < 4000, {r: engine.explain(r) for r in life.requests}
        for wanted in self.all:
            wanted.check()
        assert sorted(self.chaos.started) == sorted(self.chaos.ended) == sorted(w.request_id for w in self.all)
        engine.add_request("canary", [3, 1, 4], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        canary = life.requests["canary"]
        while engine.has_work:
            engine.step()
        assert canary.output_ids == reference_tokens([3, 1, 4], 4, windows=self.windows), canary.message
        self.check_empty()

    def check_empty(self) -> None:
        engine, life, runner = self.engine, self.engine.parts.lifecycle, self.executor.runner
        engine.check_integrity()
        engine.parts.cache.reset()
        stats = engine.parts.cache.stats()
        assert stats.free == stats.total, stats
        assert engine.table.num_running == 0
        assert engine.parts.scheduler.num_waiting == 0
        assert not engine.table.drafts
        left = {name: value for name, value in vars(life).items() if name in EMPTY and value}
        assert not left
        # The canary's own end travels with the plan after it.
        occupied = [slot for slot, request in enumerate(runner._batch.requests) if request is not None]
        assert len(occupied) <= 1
        assert sorted(runner._told) == sorted(runner._sampler._requests) == occupied
        assert not runner._grammars._slots
        assert not runner._failed
        assert not runner._errors
        assert not runner._transfers.pending


def in_flight(engine: Engine) -> set[tuple[int, int]]:
    slots = np.flatnonzero(engine.table.in_flight)
    return set(zip(slots.tolist(), engine.table.epoch[slots].tolist(), strict=True))


def pick(who: int, some: list[Wanted]) -> Wanted | None:
    return some[who % len(some)] if some else None


EMPTY = ("requests", "ended", "_leases", "_transfers", "_loads", "_stores", "_preempted", "_children")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing happens by the clock, so that a life can be repeated, and faults are not logged."""
    monkeypatch.setattr("trivet.worker.step_runner._PATIENCE", 0.0)
    monkeypatch.setattr("trivet.engine._IDLE_SECONDS", 0.0)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_short_lives() -> None:
    kit.lives(Life, 60, 30, same=True)


@pytest.mark.full
def test_long_lives() -> None:
    kit.lives(Life, 600, 60)


def threaded(seed: int, rules: int) -> None:
    """A life whose worker runs on another thread: not to be repeated, so it is driven without hypothesis."""
    rng = random.Random(seed)
    life: Any = Life()
    executor = {"depth": rng.randint(1, 3), "feedback": rng.random() < 0.7, "mode": "thread", "wire": False}
    start_at_random(life, rng, rng.choice(MEMORIES), rng.choice(SCHEDULERS), executor)
    drive(life, rng, rules)


def start_at_random(life: Any, rng: random.Random, memory: Any, scheduler: Any, executor: Any) -> None:
    transfers = rng.choice([None, {"load": rng.randint(0, 3), "store": rng.randint(0, 2), "seed": rng.randrange(100)}])
    drafts = rng.choice([None, None, "random_tree", "far"])
    life.start(memory, scheduler, executor, drafts, transfers, rng.choice([(), (7,)]))


def drive(life: Any, rng: random.Random, rules: int, more: Sequence[Callable[[], None]] = ()) -> None:
    """Let ``rules`` things happen to a life that has started, ``more`` among them, and bring it to its end."""

    def who() -> list[int]:
        return [rng.randrange(31) for _ in range(rng.randint(1, 3))]

    def prompt() -> int:
        return rng.randrange(len(PROMPTS))

    def sampling() -> dict[str, Any]:
        some = {"temperature": 0.7, "stop_token_ids": [rng.randrange(VOCAB)], "logprobs": 1, "prompt_logprobs": 1}
        return {name: value for name, value in some.items() if rng.random() < 0.4}

    choices: list[Any] = [
        lambda: life.add_plain(prompt(), rng.randint(1, 10), sampling(), rng.choice([None, "a", "b"]), None),
        lambda: life.add_long(prompt(), rng.randint(0, 2)),
        lambda: life.add_pooling(prompt()),
        lambda: life.add_structured(
            prompt(), rng.choice(["alternating", "forcing", "nonsense"]), rng.randint(1, 12), rng.randint(1, 12), 0
        ),
        lambda: life.add_family(prompt(), rng.randint(1, 3), rng.randint(1, 8)),
        lambda: life.abort(who()),
        lambda: life.stop(rng.randrange(31), rng.randint(0, 3)),
        lambda: life.hold(rng.randrange(31), rng.choice("xy")),
        life.release,
        lambda: life.throttle(rng.choice([None, None, 0, 3]), rng.choice([None, None, 1]), who()),
        lambda: life.arm(rng.choice(kit.PHASES), rng.random() < 0.5, who()),
        life.refuse,
        *[lambda: life.step(rng.randint(1, 6))] * 8,
        *more,
    ]
    try:
        for _ in range(rules):
            try:
                rng.choice(choices)()
            except OverloadedError:
                life.refused += 1
        life.finish()
    finally:
        life.engine.shutdown()


@pytest.mark.parametrize("seed", range(12))
def test_lives_with_a_worker_on_another_thread(seed: int) -> None:
    threaded(seed, 40)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_lives_with_a_worker_on_another_thread(seed: int) -> None:
    threaded(seed, 80)
