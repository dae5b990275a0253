"""Thousands of random requests, sound and unsound, at one engine: each ends, the engine lives, and nothing leaks.

A fixed request runs among them over and over and must always give the same tokens."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import kit
import numpy as np
import pytest

from trivet.async_engine import AsyncEngine
from trivet.engine import Engine
from trivet.errors import OverloadedError, RequestError
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.errors import ParameterError
from trivet_schemas.outputs import CompletionOutput, RequestOutput
from trivet_schemas.sampling import PoolingParams, SamplingParams

V = kit.VOCAB
REFUSALS = (RequestError, ParameterError, OverloadedError)
CANARY = SamplingParams(temperature=0.9, top_p=0.9, seed=42, max_tokens=12, repetition_penalty=1.2, logprobs=2)
CANARY_PROMPT = [5, 9, 2, 44, 17, 31, 8]

Values = dict[str, Callable[[random.Random], Any]]
SOUND: Values = {
    "n": lambda r: r.choice([1, 1, 2, 3]),
    "presence_penalty": lambda r: r.choice([-2.0, 0.0, 0.5, 2.0]),
    "frequency_penalty": lambda r: r.choice([-2.0, 0.3, 2]),
    "repetition_penalty": lambda r: r.choice([1e-3, 0.7, 1.3, 50.0]),
    "temperature": lambda r: r.choice([0.0, 1e-6, 0.01, 0.8, 1.0, 2.0]),
    "top_p": lambda r: r.choice([1e-9, 0.1, 0.95, 1.0]),
    "top_k": lambda r: r.choice([-1, 0, 1, 5, V, V + 1000]),
    "min_p": lambda r: r.choice([0.0, 0.1, 1.0]),
    "seed": lambda r: r.choice([None, -1, 0, 7, 2**63 - 1, -(2**63)]),
    "stop": lambda r: r.sample(["a", "bc", ". ", "zzz", "Q"], r.randint(0, 3)),
    "stop_token_ids": lambda r: [r.randrange(V) for _ in range(r.randint(0, 12))],
    "include_stop_str_in_output": lambda r: r.random() < 0.5,
    "ignore_eos": lambda r: r.random() < 0.5,
    "max_tokens": lambda r: r.choice([1, 2, 8, 30, 10**9, None]),
    "min_tokens": lambda r: r.choice([0, 0, 1, 5]),
    "logprobs": lambda r: r.choice([None, 0, 1, 5, V, -1]),
    "prompt_logprobs": lambda r: r.choice([None, None, 0, 3]),
    "logprob_token_ids": lambda r: r.choice([None, [0], [V - 1, 3]]),
    "detokenize": lambda r: r.random() < 0.8,
    "skip_special_tokens": lambda r: r.random() < 0.5,
    "logit_bias": lambda r: {r.randrange(V): r.choice([-100, -1.5, 3.0, 100]) for _ in range(r.randint(1, 9))},
    "allowed_token_ids": lambda r: r.sample(range(V), r.choice([1, 2, 20, V])),
    "bad_words": lambda r: r.sample(["a", "ab", "the", " x", "Z9"], r.randint(0, 4)),
    "output_kind": lambda r: r.choice(["cumulative", "delta", "final"]),
    "priority": lambda r: r.choice([-(2**31), -1, 0, 3, 2**40]),
    "cache_salt": lambda r: r.choice([None, "salt", "ß" * 300]),
    "best_of": lambda r: r.choice([None, None, 3]),
}
UNSOUND: Values = {
    "n": lambda r: r.choice([0, -1, 1.5, "2", None, True]),
    "presence_penalty": lambda r: r.choice([2.1, math.nan, math.inf, "x", None]),
    "frequency_penalty": lambda r: r.choice([-3, [], {}]),
    "repetition_penalty": lambda r: r.choice([0.0, -1.0, math.inf]),
    "temperature": lambda r: r.choice([-0.1, 2.5, math.nan, "hot", [1.0]]),
    "top_p": lambda r: r.choice([0.0, -1, 1.1, math.nan]),
    "top_k": lambda r: r.choice([-2, 1.5, "all"]),
    "min_p": lambda r: r.choice([-0.1, 1.1, math.inf]),
    "seed": lambda r: r.choice([2**63, 1.5, "seed", True]),
    "stop": lambda r: r.choice([[""], [3], {"a": 1}, [["a"]]]),
    "stop_token_ids": lambda r: r.choice([[-1], [V], ["a"], [1.5], 3]),
    "max_tokens": lambda r: r.choice([0, -5, 1.0, "many"]),
    "min_tokens": lambda r: r.choice([-1, 10**6, None]),
    "logprobs": lambda r: r.choice([-2, 1.5, "5"]),
    "prompt_logprobs": lambda r: r.choice([-2, True]),
    "logprob_token_ids": lambda r: r.choice([[V], [-1], ["a"]]),
    "logit_bias": lambda r: r.choice([{V: 1.0}, {-1: 1.0}, {0: 101}, {0: math.nan}, [1], {"x": 1}]),
    "allowed_token_ids": lambda r: r.choice([[], [V], [-1], ["a"]]),
    "bad_words": lambda r: r.choice([[""], [1], {"a"} | {""}]),
    "structured_outputs": lambda r: r.choice([{"regex": "a+"}, {"json": {}, "regex": "a"}, {}, 5]),
    "output_kind": lambda r: r.choice(["sometimes", 7]),
    "priority": lambda r: r.choice([1.5, "high"]),
    "cache_salt": lambda r: r.choice(["", 5]),
    "extra_args": lambda r: r.choice([5, "x", {"f": object()}]),
    "best_of": lambda r: r.choice([0, -1, "3"]),
    "no_such_field": lambda r: 1,
}


def prompt(r: random.Random) -> Any:
    """Mostly sound; also every kind of prompt that nobody should send."""
    kind = r.random()
    ids = [r.randrange(V) for _ in range(r.choice([1, 1, 2, 7, 8, 9, 16, 17, 30, 45, 63]))]
    if kind < 0.5:
        return ids
    if kind < 0.6:
        return {"prompt_token_ids": ids}
    if kind < 0.7:
        return "".join(r.choice("abc xyz.é🙂") for _ in range(r.choice([1, 5, 20])))
    if kind < 0.75:
        return np.array(ids, r.choice([np.int64, np.int32, np.uint8]))
    return r.choice(
        [
            [],
            "",
            None,
            5,
            [V],
            [-1],
            [1.5],
            ["a"],
            [[1], [2, 3]],
            [0] * 64,
            [0] * 5000,
            "a" * 10_000,
            {},
            {"prompt": "a", "prompt_token_ids": [V + 1]},
            {"prompt_token_ids": "abc"},
            {"prompt_embeds": [[0.0]]},
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            {"prompt": "a", "colour": "red"},
            np.zeros((2, 2), np.int64),
            np.array([0.5]),
            b"bytes",
            object(),
        ]
    )


def parameters(r: random.Random) -> Any:
    """Raises ParameterError where they are unsound."""
    if r.random() < 0.03:
        return r.choice([None, 5, "greedy", {"temperature": 0}, SamplingParams])
    if r.random() < 0.04:
        return PoolingParams(**r.choice([{}, {"normalize": True}, {"dimensions": 7}, {"dimensions": 10**6}]))
    names = r.sample(sorted(SOUND), r.choice([0, 1, 2, 3, 6, 12]))
    values = {name: SOUND[name](r) for name in names}
    values.setdefault("max_tokens", r.choice([1, 4, 12]))
    if r.random() < 0.15:
        for name in r.sample(sorted(UNSOUND), r.choice([1, 1, 2])):
            values[name] = UNSOUND[name](r)
    return SamplingParams(**values)


class Fuzz:
    """One engine under fire, and what became of every request."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self.engine = engine
        self.r = random.Random(seed)
        self.running: set[Any] = set()
        self.canaries: list[tuple[list[int], str]] = []
        self.fates: Counter[str] = Counter()

    def refuse(self, fate: str, error: Exception) -> None:
        assert len(str(error)) > 10, "a refusal says why"
        assert fate != "no parameters" or "SamplingParams" in str(error), error
        self.fates["in use" if "is in use" in str(error) else fate] += 1

    async def request(self, name: Any, given: Any, params: Any, leave_after: int) -> None:
        twice = name in self.running  # accepted all the same if the other one has ended, or is refused itself
        self.running.add(name)
        try:
            if isinstance(params, PoolingParams):
                output: Any = await self.engine.encode(given, params, name)
            else:
                stream = self.engine.generate(given, params, name)
                count = 0
                async with aclosing(stream):
                    async for output in stream:  # noqa: B007 - the last one counts
                        count += 1
                        if count == leave_after:
                            break
        except REFUSALS as error:
            self.refuse("refused", error)
            return
        except TypeError as error:
            self.refuse("no parameters", error)
            return
        finally:
            if not twice:
                self.running.discard(name)
        self.judge(name, output, params)

    def judge(self, name: Any, output: Any, params: Any) -> None:
        if not output.finished:
            self.fates["left"] += 1
        elif output.error is not None:
            assert len(output.error) > 10
            self.fates["error"] += 1
        elif isinstance(output, RequestOutput):
            self.fates[str(output.outputs[0].finish_reason)] += 1
            if str(name).startswith("canary"):
                self.canaries.append((output.outputs[0].token_ids, output.outputs[0].text))
            if params is not None and params.output_kind != "delta":
                for each in output.outputs:
                    check(each, params)
        else:
            self.fates["pooled"] += 1

    async def live(self, count: int, *, canary_every: int) -> None:
        r, room = self.r, asyncio.Semaphore(150)
        tasks: set[asyncio.Task[None]] = set()

        async def limited(name: Any, given: Any, params: Any, leave_after: int) -> None:
            try:
                await self.request(name, given, params, leave_after)
            finally:
                room.release()

        async def start(name: Any, given: Any, params: Any, leave_after: int = -1) -> None:
            await room.acquire()
            task = asyncio.create_task(limited(name, given, params, leave_after))
            tasks.add(task)
            if len(tasks) > 1000:
                done = {each for each in tasks if each.done()}
                tasks.difference_update(done)
                await asyncio.gather(*done)

        for number in range(count):
            if number % canary_every == 0:
                await start(f"canary {number}", CANARY_PROMPT, CANARY)
            name: Any = f"r{number}"
            if r.random() < 0.02 and (others := [each for each in self.running if not str(each).startswith("canary")]):
                name = r.choice(sorted(others, key=str))
            elif r.random() < 0.01:
                name = r.choice(["", "\ud800", 5, "r1\x00", "ü" * 1000])
            given = prompt(r)
            try:
                params = parameters(r)
            except ParameterError as error:
                self.refuse("refused", error)
                continue
            await start(name, given, params, r.choice([-1] * 12 + [1, 2]))
            if r.random() < 0.08:
                known = [*sorted(self.running, key=str), "nobody", f"r{r.randrange(number + 1)}"]
                target = r.choice(known)
                if not str(target).startswith("canary"):
                    await self.engine.abort([target])
        await asyncio.gather(*tasks)
        for _ in range(1000):
            if not await self.engine.call(lambda engine: engine.has_work):
                break
            await asyncio.sleep(0.01)


def check(output: CompletionOutput, params: SamplingParams) -> None:
    """What the parameters promise of an output."""
    tokens = list(output.token_ids)
    assert all(0 <= token < V for token in tokens)
    assert params.max_tokens is None or len(tokens) <= params.max_tokens
    if output.finish_reason == "stop":
        assert len(tokens) >= params.min_tokens
    if output.finish_reason == "abort":
        return
    if params.allowed_token_ids is not None:
        assert set(tokens) <= set(params.allowed_token_ids)
    if params.repetition_penalty == 1 and params.allowed_token_ids is None and params.temperature <= 1:
        # The penalty applies after the bias, and may make what is forbidden the least evil.
        assert not any(bias == -100 and token in tokens for token, bias in (params.logit_bias or {}).items())
    if params.logprobs is not None:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(tokens)
        for token, entry in zip(tokens, output.logprobs, strict=True):
            assert token in entry
            assert entry[token].logprob <= 0
    elif params.logprob_token_ids is None:
        assert output.logprobs is None
    for word in params.bad_words:
        ids = FakeTokenizer().encode(word)
        assert not any(tokens[i : i + len(ids)] == ids for i in range(len(tokens)))


async def fuzz(library: Any, count: int, seed: int, **roles: Any) -> Counter[str]:
    config = kit.settings(library.path("qwen3"), "qwen3", block_size=8, budget=96, small=False)
    config["plugins"]["cache"]["num_blocks"] = 120  # memory is short now and then
    config["plugins"]["scheduler"]["max_num_queued_reqs"] = 200
    for role, options in roles.items():
        config["plugins"][role] = {**config["plugins"].get(role, {}), **options}
    async with AsyncEngine(config, [FakeTokenizer()]) as engine:
        one = Fuzz(engine, seed)
        await one.live(count, canary_every=50)
        assert engine.fault is None
        await engine.call(inspect)
    assert len(one.canaries) == -(-count // 50), one.fates
    assert all(canary == one.canaries[0] for canary in one.canaries), "the fixed request gave other tokens"
    assert len(one.canaries[0][0]) == 12
    assert sum(one.fates.values()) == count + len(one.canaries), "a request has no end"
    return one.fates


def inspect(engine: Engine) -> None:
    engine.check_integrity()
    stats = engine.parts.cache.stats()
    assert stats.free == stats.total, "blocks are in use after everything has ended"
    assert not engine.parts.lifecycle.requests


def test_random_requests_end_and_harm_nobody(library: Any) -> None:
    fates = asyncio.run(fuzz(library, 1500, seed=1))
    assert {"refused", "in use", "left", "stop", "length", "abort", "error", "pooled"} <= fates.keys(), fates


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_twenty_thousand_random_requests(library: Any, seed: int) -> None:
    roles: dict[str, Any] = [
        {},
        {"scheduler": {"policy": "priority", "victim": "least_computed"}, "cache": {"num_blocks": 30}},
        {"executor": {"use": "inline", "async_scheduling": True}},
        {"scheduler": {"policy": "fair_share", "max_num_batched_tokens": 11}},
    ][seed]
    asyncio.run(fuzz(library, 5000, seed=100 + seed, **roles))


@pytest.mark.full
def test_twenty_thousand_in_one_engine(library: Any) -> None:
    asyncio.run(fuzz(library, 20_000, seed=7))
