"""What a caller may pass with a request: refused at once by name, or carried without harm to anyone else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_kit import FAKE, check_free, config, drain, engine, greedy

from trivet import LLM
from trivet.engine import Engine
from trivet.errors import RequestError, TrivetError
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet.wire import encode
from trivet_schemas.sampling import PoolingParams, SamplingParams

LONE = "\ud800"


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"request_id": 5}, "request_id must be a string, got 5"),
        ({"request_id": None}, "request_id must be a string"),
        ({"request_id": ["a"]}, "request_id must be a string"),
        ({"request_id": LONE}, "request_id is not valid Unicode at character 0"),
        ({"adapter": 7}, "adapter must be a string"),
        ({"adapter": LONE}, "adapter is not valid Unicode"),
        ({"parent": 3}, "parent must be a string"),
        ({"cache_tags": {"a": "text"}}, r"cache_tags\['a'\] must be bytes, got str"),
        ({"extra": {1: b""}}, "extra must be a string, got 1"),
        ({"extra": {"a": 1}}, r"extra\['a'\] must be bytes, got int"),
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"arrival_time": 10**400}, "arrival_time must be a number"),
        ({"arrival_time": "now"}, "arrival_time must be a number"),
        ({"arrival_time": float("nan")}, "arrival_time must be a number, got nan"),
        ({"prompt_token_ids": None}, "list of integers"),
        ({"prompt_token_ids": 5}, "list of integers"),
        ({"prompt_token_ids": "abc"}, "list of integers"),
        ({"prompt_token_ids": [[1], [1, 2]]}, "list of integers"),
        ({"prompt_token_ids": [1, None]}, "list of integers"),
        ({"prompt_token_ids": [2**70]}, "list of integers"),
        ({"prompt_token_ids": [2**40]}, "token id 1099511627776 is outside"),
        ({"prompt_token_ids": np.zeros((0,), np.int32)}, "empty"),
        ({"prompt_token_ids": ()}, "empty"),
        ({"params": greedy(1, structured_outputs={"regex": LONE})}, "structured_outputs: cannot be sent to a worker"),
        ({"params": greedy(1, extra_args={"a": object()})}, "extra_args: cannot be sent to a worker.*object"),
        ({"params": SamplingParams(n=3)}, "n: the engine takes one output per request, got 3"),
        ({"params": PoolingParams(extra_args={"a": 2**70})}, "extra_args: cannot be sent to a worker"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_would_harm_others_is_refused(details: dict[str, Any], message: str) -> None:
    with engine() as e:
        e.add_request("good", [1, 2], greedy(3))
        bad = {"request_id": "bad", "prompt_token_ids": [1], "params": greedy(1)} | details
        with pytest.raises(RequestError, match=message):
            e.add_request(**bad)
        assert drain(e)["good"].output_ids == reference_tokens([1, 2], 3)
        check_free(e)


@pytest.mark.parametrize("name", ["", " ", "a#1", "é\n\0", "漢字/💥", "x" * 5000])
def test_an_id_may_be_any_text(name: str) -> None:
    plans: list[Any] = []
    with engine() as e:
        e.hooks.run, run = lambda plan: plans.append(encode(plan)) or run(plan), e.hooks.run
        e.add_request(name, [1, 2], greedy(3))
        assert drain(e)[name].output_ids == reference_tokens([1, 2], 3)
        assert plans


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_a_seed_may_be_any_signed_64_bit_number(seed: int) -> None:
    with engine() as e:
        e.hooks.run, run = lambda plan: encode(plan) and run(plan), e.hooks.run
        for name in ("a", "b"):
            e.add_request(name, [1, 2], SamplingParams(temperature=1, seed=seed, max_tokens=8))
        done = drain(e)
        if seed != -1:  # which is the same as none
            assert done["a"].output_ids == done["b"].output_ids


@pytest.mark.parametrize(
    "prompt", [np.array([1, 2], np.uint8), np.array([1, 2], np.int64), (1, 2), [np.int64(1), 2], range(1, 3)], ids=repr
)
def test_a_prompt_may_be_any_sequence_of_integers(prompt: Any) -> None:
    with engine() as e:
        e.add_request("a", prompt, greedy(3))
        if isinstance(prompt, np.ndarray):
            prompt[:] = 63  # the caller's array is its own
        assert drain(e)["a"].output_ids == reference_tokens([1, 2], 3)


@pytest.mark.parametrize("length", [1, 2, 40, 94, 95])
@pytest.mark.parametrize("tokens", [None, 1, 10**6])
@pytest.mark.parametrize("block_size", [1, 16, 1000])
def test_the_context_is_used_to_its_last_position(length: int, tokens: int | None, block_size: int) -> None:
    prompt = [(7 * i) % 64 for i in range(length)]
    with engine(cache={"use": "paged", "block_size": block_size}) as e:
        e.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=tokens))
        done = drain(e)
        expected = reference_tokens(prompt, min(tokens or 96, 96 - length))
        assert (done["a"].output_ids, done["a"].finish_reason) == (expected, "length")
        check_free(e)


def test_a_prompt_of_the_whole_context_can_be_pooled() -> None:
    with engine() as e:
        e.add_request("a", [1] * 96, PoolingParams(task="embed"))
        pooled = []
        while e.has_work:
            pooled += e.step().pooled
        assert len(pooled) == 1
        check_free(e)


@pytest.mark.parametrize("use", ["continuous", "static"])
@pytest.mark.parametrize("limits", [(1, 1), (1, 1000), (1000, 1), (5000, 5)])
def test_the_smallest_and_the_largest_batches(use: str, limits: tuple[int, int]) -> None:
    scheduler = {"use": use, "max_num_seqs": limits[0], "max_num_batched_tokens": limits[1]}
    with engine(scheduler=scheduler) as e:
        for i in range(6):
            e.add_request(str(i), [1, 2, 3 + i], greedy(4))
        done = drain(e)
        for i in range(6):
            assert done[str(i)].output_ids == reference_tokens([1, 2, 3 + i], 4)


def test_columns_that_memory_cannot_hold_are_named() -> None:
    scheduler = {"use": "continuous", "max_num_seqs": 10**12}
    settings = {"model": "fake", "max_model_len": 96, "plugins": {**FAKE, "scheduler": scheduler}}
    with pytest.raises(TrivetError, match="Lower max_num_seqs of the scheduler or max_model_len"):
        Engine(settings, [fakes])


def test_one_id_may_be_aborted_as_it_is() -> None:
    with engine() as e:
        for name in ("1", "2", "12"):
            e.add_request(name, [1], greedy(2))
        e.abort("12")
        done = drain(e)
        assert {i: r.finish_reason for i, r in done.items()} == {"1": "length", "2": "length", "12": "abort"}


def test_a_priority_may_be_any_integer() -> None:
    scheduler = {"use": "continuous", "max_num_seqs": 1, "policy": "priority"}
    with engine(scheduler=scheduler) as e:
        for name, priority in {"last": 10**400, "second": 3, "first": -(10**400)}.items():
            e.add_request(name, [1, 2], greedy(2), priority=priority)
        assert list(drain(e)) == ["first", "second", "last"]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_there_are_tokens_are_refused(field: str) -> None:
    with engine() as e:
        vocab = e.model.vocab_size
        e.validate([1], greedy(1, **{field: vocab}))
        e.validate([1], greedy(1, **{field: -1}))
        with pytest.raises(
            RequestError, match=f"^{field}: must not exceed the vocabulary size {vocab} .*got 10000000$"
        ) as no:
            e.validate([1], greedy(1, **{field: 10**7}))
        assert no.value.param == field


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_the_configuration_limits_logprobs(field: str) -> None:
    with LLM.from_config(config() | {"max_logprobs": 2}, [fakes]) as llm:
        (output,) = llm.generate([[1]], greedy(1, **{field: 2}), use_tqdm=False)
        assert output.error is None
        for count in (3, -1):
            with pytest.raises(RequestError, match=f"^{field}: must be at most 2 .*max_logprobs, got {count}$"):
                llm.generate([[1]], greedy(1, **{field: count}), use_tqdm=False)
