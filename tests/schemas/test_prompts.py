from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet_schemas.errors import ParameterError
from trivet_schemas.prompts import ParsedPrompt, TextPrompt, TokensPrompt, parse_prompt


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hello", ParsedPrompt("hello", None)),
        (" ", ParsedPrompt(" ", None)),
        ([1, 2], ParsedPrompt(None, [1, 2])),
        ((1, 2), ParsedPrompt(None, [1, 2])),
        (range(2), ParsedPrompt(None, [0, 1])),
        ([np.int64(3)], ParsedPrompt(None, [3])),
        (np.array([4, 5], np.int32), ParsedPrompt(None, [4, 5])),
        (TextPrompt(prompt="x", cache_salt="s"), ParsedPrompt("x", None, "s")),
        (TokensPrompt(prompt_token_ids=[1]), ParsedPrompt(None, [1])),
        ({"prompt_token_ids": [1], "prompt": "x"}, ParsedPrompt("x", [1])),
        ({"prompt": "x", "prompt_token_ids": None}, ParsedPrompt("x", None)),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, ParsedPrompt("x", None, None, {"image": 1})),
    ],
)
def test_forms(value: Any, expected: ParsedPrompt) -> None:
    parsed = parse_prompt(value)
    assert parsed == expected
    assert parsed.token_ids is None or all(type(token) is int for token in parsed.token_ids)


@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        ("", "prompt", "must not be empty"),
        ([], "prompt", "at least one token"),
        (np.array([], np.int64), "prompt", "at least one token"),
        (b"x", "prompt", "not bytes"),
        (None, "prompt", "must be text, a list of token ids"),
        (5, "prompt", "got 5"),
        ([1, True], "prompt.1", "got True"),
        ([1.0], "prompt.0", "got 1.0"),
        ([-1], "prompt.0", "got -1"),
        (["a", "b"], "prompt.0", "several prompts"),
        ([[1, 2]], "prompt.0", "several prompts"),
        (np.zeros((2, 2), np.int64), "prompt", "one-dimensional"),
        (np.array([0.5]), "prompt.0", "got 0.5"),
        ({}, "prompt", "one of 'prompt' and 'prompt_token_ids'"),
        ({"prompt": [1]}, "prompt", "'prompt_token_ids'"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids", "list of token ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "at least one token"),
        ({"prompt": "x", "promt": 1}, "promt", "did you mean 'prompt'?"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt", "got 5"),
        ({"prompt": "x", "cache_salt": "a\ud800"}, "cache_salt", "valid Unicode"),
        ({"prompt": "x", "multi_modal_data": 5}, "multi_modal_data", "mapping"),
    ],
)
def test_wrong_shapes(value: Any, path: str, text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_prompt(value)
    assert [p.path for p in caught.value.problems] == [path]
    assert text in caught.value.problems[0].message


def test_all_problems_of_a_mapping_are_reported() -> None:
    with pytest.raises(ParameterError) as caught:
        parse_prompt({"prompt": 5, "prompt_token_ids": [], "x": 1})
    assert [p.path for p in caught.value.problems] == ["x", "prompt", "prompt_token_ids"]


def test_a_long_list_of_the_wrong_kind_gives_a_short_message() -> None:
    with pytest.raises(ParameterError) as caught:
        parse_prompt([1.5] * 10_000)
    assert len(str(caught.value)) < 200


def test_check_vocabulary_names_the_position() -> None:
    parse_prompt([5, 99]).check_vocabulary(100)
    parse_prompt("text").check_vocabulary(1)
    with pytest.raises(
        ParameterError, match=r"prompt_token_ids.1: token ids must be below the vocabulary size 99, got 99"
    ):
        parse_prompt([5, 99, 100]).check_vocabulary(99)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_anything_is_a_prompt_or_a_parameter_error(value: Any) -> None:
    outcome: ParsedPrompt | ParameterError
    try:
        outcome = parse_prompt(value)
    except ParameterError as exc:
        outcome = exc
    if isinstance(outcome, ParameterError):
        assert outcome.problems[0].path.startswith("prompt")
    else:
        assert value == (outcome.text if isinstance(value, str) else outcome.token_ids)


def test_embeddings_in_place_of_a_prompt_are_refused_with_what_to_give() -> None:
    with pytest.raises(ParameterError, match="cannot be given as embeddings here; give text"):
        parse_prompt({"prompt_embeds": [[0.0, 1.0]]})
