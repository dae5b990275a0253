from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet_schemas.batch_io import BatchLine, parse_batch_lines
from trivet_schemas.sampling import SamplingParams


def parse(*lines: Any, defaults: SamplingParams | None = None) -> list[tuple[int, BatchLine | str]]:
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    return list(parse_batch_lines(texts, defaults))


def one(line: Any, defaults: SamplingParams | None = None) -> BatchLine:
    ((_, parsed),) = parse(line, defaults=defaults)
    assert isinstance(parsed, BatchLine), parsed
    return parsed


def error(line: Any) -> str:
    ((_, parsed),) = parse(line)
    assert isinstance(parsed, str)
    return parsed


def test_forms_of_a_prompt() -> None:
    assert one({"prompt": "a"}) == BatchLine("line-1", SamplingParams(), prompt="a")
    assert one({"prompt_token_ids": [1, 2]}).prompt_token_ids == [1, 2]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert one({"messages": messages}).messages == messages


def test_sampling_beside_the_prompt_or_nested_changes_the_defaults() -> None:
    defaults = SamplingParams(temperature=0.5, max_tokens=64)
    line = one({"prompt": "a", "max_tokens": 8, "sampling": {"top_p": 0.5}}, defaults)
    assert line.sampling == SamplingParams(temperature=0.5, max_tokens=8, top_p=0.5)
    assert one({"prompt": "a", "sampling": {"max_tokens": None}}, defaults).sampling.max_tokens is None
    assert one({"prompt": "a", "max_tokens": None}, defaults).sampling.max_tokens == 64
    assert defaults.max_tokens == 64


@pytest.mark.parametrize(("given_id", "expected"), [("x", "x"), (7, "7"), (None, "line-1")])
def test_ids(given_id: Any, expected: str) -> None:
    assert one({"id": given_id, "prompt": "a"}).id == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON at column 2"),
        ("{'prompt': 1}", "not valid JSON"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is no JSON number"),
        ('{"prompt": "a", "prompt": "b"}', "prompt: is given twice"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "must be an object"),
        ("5", "must be an object"),
        (b'{"prompt": "\xff"}', "is not UTF-8 text (byte 12)"),
        ({}, "exactly one of prompt, prompt_token_ids, messages must be given, got none"),
        ({"prompt": "a", "messages": []}, "got prompt and messages"),
        ({"prompt": ""}, "prompt: must not be empty"),
        ({"prompt": 5}, "prompt: must be a string, got 5"),
        ({"prompt_token_ids": [1, "x"]}, "prompt_token_ids.1: must be a token id"),
        ({"prompt": "a", "temperatur": 1}, "temperatur: unknown key 'temperatur'; did you mean 'temperature'?"),
        ({"promt": "a"}, "did you mean 'prompt'?"),
        ({"prompt": "a", "temperature": 9}, "temperature: must be at most 2.0, got 9"),
        ({"prompt": "a", "sampling": {"temperature": 9}}, "sampling.temperature: must be at most 2.0, got 9"),
        ({"prompt": "a", "sampling": {"tmp": 9}}, "sampling.tmp: unknown field 'tmp'"),
        ({"prompt": "a", "sampling": 5}, "sampling: must be an object"),
        ({"prompt": "a", "n": 1, "sampling": {"n": 2}}, "n: is given twice, by itself and under 'sampling'"),
        ({"prompt": "a", "id": True}, "id: must be a non-empty string or an integer, got True"),
        ({"prompt": "a", "id": ""}, "id: must be"),
        ({"messages": []}, "messages: must be a non-empty list"),
        ({"messages": ["Hi"]}, "messages.0: must be an object"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role: must be a string like 'user', got None"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: must be a string"),
    ],
)
def test_what_is_wrong_with_a_line(line: Any, message: str) -> None:
    assert message in error(line)


def test_all_problems_of_a_line_are_in_its_text() -> None:
    text = error({"prompt": "", "n": 0, "x": 1})
    assert text.count("; ") >= 2
    assert all(word in text for word in ("prompt: ", "n: ", "x: "))


def test_a_wrong_line_is_numbered_and_the_rest_goes_on() -> None:
    parsed = parse({"prompt": "a"}, "", "oops", "  \n", {"prompt": "b"})
    assert [number for number, _ in parsed] == [1, 3, 5]
    assert [isinstance(line, BatchLine) for _, line in parsed] == [True, False, True]


def test_an_id_is_used_once() -> None:
    parsed = parse(
        {"id": "x", "prompt": "a"}, {"prompt": "b"}, {"id": "x", "prompt": "c"}, {"id": "line-2", "prompt": "d"}
    )
    assert [line for _, line in parsed if isinstance(line, str)] == [
        "id: 'x' is the id of line 1 already",
        "id: 'line-2' is the id of line 2 already",
    ]


def test_a_byte_order_mark_is_no_obstacle() -> None:
    ((_, line),) = parse("\ufeff" + '{"prompt": "a"}')
    assert isinstance(line, BatchLine)


def test_lines_are_parsed_lazily() -> None:
    def lines() -> Any:
        yield '{"prompt": "a"}'
        raise AssertionError("the second line was asked for")

    number, _ = next(parse_batch_lines(lines()))
    assert number == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["id", "prompt", "prompt_token_ids", "messages", "sampling", "n", "stop", "x"])


@given(st.dictionaries(keys, json_values, max_size=4) | json_values)
def test_any_json_is_a_request_or_a_text(value: Any) -> None:
    ((number, parsed),) = parse(json.dumps(value))
    assert number == 1
    assert isinstance(parsed, BatchLine) or parsed


def test_unknown_keys_hint_at_what_is_for_plugins_or_found_elsewhere() -> None:
    assert error({"prompt": "a", "user": "ann"}).endswith("; data for plugins goes into extra_args")
    assert error({"prompt": "a", "use_beam_search": True}).startswith(
        "use_beam_search: unknown key 'use_beam_search'; call"
    )
