"""The requests that benchmarks of speed run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from trivet.bench.datasets import (
    BenchRequest,
    check_lengths,
    prefix_repetition_requests,
    random_requests,
    sharegpt_requests,
)
from trivet.errors import TrivetError
from trivet.testing.fakes import FakeTokenizer

IDS = np.arange(3, 50, dtype=np.int32)


def test_random_requests_have_the_lengths_that_are_asked_for_and_a_shared_prefix() -> None:
    requests = random_requests(20, IDS, input_len=7, output_len=5, prefix_len=4, seed=1)
    assert [(len(r.prompt_token_ids), r.output_len) for r in requests] == [(11, 5)] * 20
    assert len({tuple(r.prompt_token_ids[:4]) for r in requests}) == 1
    assert len({tuple(r.prompt_token_ids[4:]) for r in requests}) == 20
    assert {token for r in requests for token in r.prompt_token_ids} <= set(IDS.tolist())


def test_a_range_ratio_varies_prompts_and_outputs_for_themselves() -> None:
    requests = random_requests(400, IDS, input_len=10, output_len=20, range_ratio=(0.5, 0.1), seed=2)
    assert {len(r.prompt_token_ids) for r in requests} == set(range(5, 16))
    assert {r.output_len for r in requests} == set(range(18, 23))
    shortest = random_requests(200, IDS, input_len=1, output_len=1, range_ratio=(0.99, 0.99))
    assert min(len(r.prompt_token_ids) for r in shortest) == min(r.output_len for r in shortest) == 1


def test_random_requests_depend_on_the_seed_alone() -> None:
    first, again, other = (random_requests(5, IDS, input_len=30, output_len=3, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_repeated_prefixes_are_shared_by_as_many_requests_each() -> None:
    options = {"prefix_len": 6, "suffix_len": 3, "num_prefixes": 4, "output_len": 5}
    requests = prefix_repetition_requests(22, IDS, **options, seed=1)
    assert [(len(r.prompt_token_ids), r.output_len) for r in requests] == [(9, 5)] * 20
    prefixes = [tuple(r.prompt_token_ids[:6]) for r in requests]
    assert sorted(Counter(prefixes).values()) == [5] * 4
    assert prefixes != sorted(prefixes, key=prefixes.index), "in random order"
    assert len({tuple(r.prompt_token_ids[6:]) for r in requests}) > 15
    assert requests == prefix_repetition_requests(22, IDS, **options, seed=1)
    assert requests != prefix_repetition_requests(22, IDS, **options, seed=2)


def conversations(path: Path, *turns: tuple[str, ...]) -> Path:
    content = [
        {"id": str(i), "conversations": [{"from": "x", "value": text} for text in t]} for i, t in enumerate(turns)
    ]
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_conversations_give_prompts_and_the_lengths_of_answers(tmp_path: Path) -> None:
    turns = [("how are you", "very well", "more"), ("what is it", "a stone"), ("alone",), ("x", "a short prompt")]
    path = conversations(tmp_path / "talk.json", *turns, ("y" * 2000, "a long prompt"), ("long answer", "z" * 2040))
    tokenizer = FakeTokenizer()
    requests = sharegpt_requests(path, 2, tokenizer, seed=3)
    found = {(tokenizer.decode(r.prompt_token_ids), r.output_len) for r in requests}
    assert found == {("how are you", 9), ("what is it", 7)}
    assert sharegpt_requests(path, 2, tokenizer, seed=3) == requests


def test_conversations_are_repeated_unless_that_is_forbidden(tmp_path: Path) -> None:
    path = conversations(tmp_path / "talk.json", ("how are you", "very well"), ("what is it", "a stone"))
    tokenizer = FakeTokenizer()
    requests = sharegpt_requests(path, 5, tokenizer)
    assert requests == [*requests[:2], *requests[:2], requests[0]]
    assert len(sharegpt_requests(path, 5, tokenizer, oversample=False)) == 2


def test_an_output_length_replaces_that_of_the_answer(tmp_path: Path) -> None:
    path = conversations(tmp_path / "talk.json", ("how are you", ""))
    (request,) = sharegpt_requests(path, 1, FakeTokenizer(), output_len=3)
    assert request.output_len == 3


def test_conversations_that_the_engine_would_refuse_are_passed_over(tmp_path: Path) -> None:
    path = conversations(tmp_path / "talk.json", ("how are you", "very well"), ("what is it", "a stone"))
    requests = sharegpt_requests(path, 4, FakeTokenizer(), max_model_len=17)
    assert {r.output_len for r in requests} == {7}
    with pytest.raises(TrivetError, match="at most 16 together"):
        sharegpt_requests(path, 4, FakeTokenizer(), max_model_len=16)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "cannot be read"),
        ("[{", "is no JSON"),
        ("3", "must hold a list"),
        ('["text"]', "must hold a list"),
        ('[{"conversations": [{"value": 3}]}]', "must hold a list"),
        ('[{"conversations": [{"text": "a"}]}]', "must hold a list"),
        ("[]", "has no conversation"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "talk.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(TrivetError, match=named) as caught:
        sharegpt_requests(path, 1, FakeTokenizer())
    assert str(caught.value).startswith(f"--dataset-path: {path}")


def test_requests_longer_than_the_engine_takes_are_refused_with_the_options() -> None:
    requests = [BenchRequest([1] * 4, 4), BenchRequest([1] * 6, 5)]
    check_lengths(requests, 11, ("--a", "--b"))
    with pytest.raises(TrivetError, match="--a and --b: a prompt of 6 tokens and 5 to generate are 11 together"):
        check_lengths(requests, 10, ("--a", "--b"))
