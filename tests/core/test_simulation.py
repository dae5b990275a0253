"""Engines without a model: real scheduling and caching, steps that end at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from engine_kit import check_free, drain, greedy

from trivet.engine import Engine
from trivet.errors import RequestError
from trivet.llm import LLM
from trivet.plan import Int32
from trivet.simulation import IdTokenizer, SimulatedExecutor, simple_layers
from trivet_schemas.sampling import SamplingParams

VOCAB = 1000


def settings(**cache: Any) -> dict[str, Any]:
    plugins = {
        "cache": {"use": "paged", "block_size": 4, **cache},
        "scheduler": {"use": "continuous", "max_num_seqs": 8, "max_num_batched_tokens": 64},
    }
    return {"model": "none", "plugins": plugins}


@contextmanager
def simulation(windows: Any = (None,), cache: Any = None, **executor: Any) -> Iterator[Engine]:
    layers = simple_layers(6, num_kv_heads=1, head_dim=4, dtype="float16", windows=windows)
    parts = SimulatedExecutor(layers, vocab_size=VOCAB, max_model_len=128, available_bytes=1 << 20, **executor)
    e = Engine(settings(**(cache or {})), [parts, IdTokenizer(VOCAB)])
    try:
        yield e
    finally:
        e.shutdown()


def place(slots: Int32, positions: Int32) -> Int32:
    return positions * 1


def test_layers_repeat_the_pattern_of_windows() -> None:
    layers = simple_layers(7, num_kv_heads=2, head_dim=64, dtype="bfloat16", windows=[512, 512, None])
    assert [spec.window for spec in layers] == [512, 512, None, 512, 512, None, 512]
    assert [spec.kind for spec in layers[:3]] == ["sliding", "sliding", "full"]
    assert layers[0].bytes_per_token == 2 * 2 * 64 * 2


@pytest.mark.parametrize("in_flight", [1, 3])
def test_every_row_that_samples_draws_by_the_rule(in_flight: int) -> None:
    with simulation(tokens=place, max_in_flight=in_flight) as e:
        e.add_request("short", [7] * 5, greedy(3))
        e.add_request("chunked", [7] * 90, greedy(4))
        done = drain(e)
        assert done["short"].output_ids == [5, 6, 7]
        assert done["chunked"].output_ids == [90, 91, 92, 93]
        check_free(e)


def test_a_constant_token_can_stop_an_output() -> None:
    with simulation(tokens=9) as e:
        e.add_request("a", [1, 2], SamplingParams(max_tokens=5, stop_token_ids=[9]))
        done = drain(e)
        assert (done["a"].output_ids, done["a"].stop_reason) == ([9], 9)


def test_the_real_cache_finds_prefixes() -> None:
    with simulation() as e:
        prompt = list(range(40))
        e.add_request("first", prompt, greedy(2))
        drain(e)
        e.add_request("second", prompt, greedy(2))
        assert drain(e)["second"].num_cached_tokens == 36


def test_memory_is_the_layers() -> None:
    with simulation() as full, simulation(windows=[8, 8, None]) as mixed:
        assert full.parts.layout.num_bytes <= 1 << 20
        assert [group.window for group in full.parts.layout.groups] == [None]
        assert {group.window for group in mixed.parts.layout.groups} == {8, None}
        mixed.add_request("a", [3] * 100, greedy(10))
        drain(mixed)
        check_free(mixed)


def test_many_requests_preempt_each_other_and_end() -> None:
    with simulation(cache={"num_blocks": 33}, tokens=place, max_in_flight=2) as e:
        rng = np.random.default_rng(0)
        work = {str(i): rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist() for i in range(20)}
        for name, prompt in work.items():
            e.add_request(name, prompt, greedy(40))
        done = drain(e)
        assert any(r.num_preemptions for r in done.values())
        for name, prompt in work.items():
            assert done[name].output_ids == list(range(len(prompt), len(prompt) + 40))
        check_free(e)


def test_what_needs_logits_is_refused() -> None:
    with simulation() as e, pytest.raises(RequestError, match="logprobs"):
        e.add_request("a", [1], SamplingParams(logprobs=1))


def test_no_worker_can_be_called() -> None:
    with simulation() as e, pytest.raises(AttributeError, match="no worker whose 'execute'"):
        e.parts.executor.call("execute")


def test_an_llm_answers_in_ids() -> None:
    executor = SimulatedExecutor(
        simple_layers(2), vocab_size=VOCAB, max_model_len=64, available_bytes=1 << 24, tokens=place
    )
    llm = LLM(model="none", plugins=[executor, IdTokenizer(VOCAB)])
    (output,) = llm.generate("17 4 cat 17", SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.prompt_token_ids == [17, 4, sum(map(ord, "cat")), 17]
    assert output.outputs[0].text == "4 5 6"
