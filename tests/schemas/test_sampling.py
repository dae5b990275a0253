from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet_schemas.errors import ParameterError
from trivet_schemas.sampling import ENGINE_FIELDS, PoolingParams, RequestOutputKind, SamplingParams
from trivet_schemas.structured import StructuredOutputsParams


def problems(**values: Any) -> dict[str, str]:
    """Path → message of the problems that the parameters have."""
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**values)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert params.model_dump() == {
        "n": 1,
        "best_of": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logprob_token_ids": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "structured_outputs": None,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "priority": 0,
        "cache_salt": None,
        "extra_args": None,
    }
    assert not params.greedy


@pytest.mark.parametrize(
    ("given_values", "field", "expected"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"seed": -1}, "seed", None),
        ({"seed": -(2**63)}, "seed", -(2**63)),
        ({"stop": "\n"}, "stop", ["\n"]),
        ({"stop": None}, "stop", []),
        ({"stop": ("a", "b")}, "stop", ["a", "b"]),
        ({"stop_token_ids": None}, "stop_token_ids", []),
        ({"stop_token_ids": {7}}, "stop_token_ids", [7]),
        ({"stop_token_ids": np.array([3, 4])}, "stop_token_ids", [3, 4]),
        ({"bad_words": "x"}, "bad_words", ["x"]),
        ({"max_tokens": None}, "max_tokens", None),
        ({"max_tokens": np.int32(7)}, "max_tokens", 7),
        ({"temperature": np.float32(0.5)}, "temperature", 0.5),
        ({"temperature": 1}, "temperature", 1.0),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": -1}, "logprobs", -1),
        ({"logit_bias": {"5": 1, 6: -100}}, "logit_bias", {5: 1.0, 6: -100.0}),
        ({"output_kind": "delta"}, "output_kind", RequestOutputKind.DELTA),
        ({"output_kind": "final_only"}, "output_kind", RequestOutputKind.FINAL_ONLY),
        ({"output_kind": RequestOutputKind.FINAL_ONLY}, "output_kind", RequestOutputKind.FINAL_ONLY),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs", StructuredOutputsParams(regex="a+")),
    ],
)
def test_forms_that_users_write_are_normalised(given_values: dict[str, Any], field: str, expected: Any) -> None:
    value = getattr(SamplingParams(**given_values), field)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("values", "field", "rule", "shown"),
    [
        ({"n": 0}, "n", "at least 1", "0"),
        ({"n": True}, "n", "whole number", "True"),
        ({"n": 100_000}, "n", "at most 16384", "100000"),
        ({"best_of": 16_385}, "best_of", "at most 16384", "16385"),
        ({"temperature": -0.1}, "temperature", "at least 0", "-0.1"),
        ({"temperature": 2.5}, "temperature", "at most 2", "2.5"),
        ({"temperature": "0.5"}, "temperature", "number", "'0.5'"),
        ({"temperature": float("nan")}, "temperature", "finite", "nan"),
        ({"temperature": float("inf")}, "temperature", "finite", "inf"),
        ({"temperature": None}, "temperature", "number", "None"),
        ({"top_p": 0}, "top_p", "greater than 0", "0"),
        ({"top_p": 1.1}, "top_p", "at most 1", "1.1"),
        ({"top_k": -2}, "top_k", "at least 0", "-2"),
        ({"top_k": 1.5}, "top_k", "whole number", "1.5"),
        ({"min_p": -0.1}, "min_p", "at least 0", "-0.1"),
        ({"min_p": 1.1}, "min_p", "at most 1", "1.1"),
        ({"presence_penalty": 2.1}, "presence_penalty", "at most 2", "2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "at least -2", "-2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0", "0"),
        ({"seed": 1.0}, "seed", "whole number", "1.0"),
        ({"seed": 2**63}, "seed", "less than", str(2**63)),
        ({"max_tokens": 0}, "max_tokens", "at least 1", "0"),
        ({"min_tokens": -1}, "min_tokens", "at least 0", "-1"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens=16", "17"),
        ({"logprobs": -2}, "logprobs", "at least -1", "-2"),
        ({"stop": ""}, "stop.0", "empty", "''"),
        ({"stop": ["a", 5]}, "stop.1", "string", "5"),
        ({"stop": 5}, "stop", "list", "5"),
        ({"stop": ["a"], "detokenize": False}, "stop", "detokenize", "['a']"),
        ({"bad_words": ["a", ""]}, "bad_words.1", "empty", "''"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "at least 0", "-1"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty", "[]"),
        ({"logit_bias": {5: 100.5}}, "logit_bias.5", "at most 100", "100.5"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "whole number", "'x'"),
        ({"logit_bias": {-5: 1}}, "logit_bias.-5", "at least 0", "-5"),
        ({"n": 2, "temperature": 0}, "n", "greedy", "2"),
        ({"output_kind": "dleta"}, "output_kind", "did you mean 'delta'?", "'dleta'"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false", "1"),
        ({"cache_salt": ""}, "cache_salt", "empty", "''"),
        ({"extra_args": 5}, "extra_args", "mapping", "5"),
        ({"structured_outputs": "x"}, "structured_outputs", "mapping", "'x'"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one", "none"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "did you mean 'regex'?", "'regx'"),
    ],
)
def test_a_broken_rule_names_field_rule_and_value(values: dict[str, Any], field: str, rule: str, shown: str) -> None:
    found = problems(**values)
    assert list(found) == [field]
    assert rule in found[field]
    assert shown in found[field]


def test_an_unknown_field_is_refused_with_the_nearest_one() -> None:
    assert problems(temprature=1) == {"temprature": "unknown field 'temprature'; did you mean 'temperature'?"}
    assert problems(TopP=1)["TopP"].endswith("did you mean 'top_p'?")
    listed = problems(zzz=1)["zzz"]
    assert all(name in listed for name in SamplingParams.model_fields)
    assert listed.endswith("; data for plugins goes into extra_args")


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("guided_decoding", "structured_outputs"),
        ("logits_processors", "plugins.logits_processor of the configuration"),
        ("use_beam_search", "LLM.beam_search"),
        ("truncate_prompt_tokens", "shorten the prompt"),
    ],
)
def test_a_field_that_is_found_elsewhere_is_refused_with_the_place(field: str, remedy: str) -> None:
    found = problems(**{field: 1})
    assert found[field].startswith(f"unknown field {field!r}; ")
    assert remedy in found[field]


def test_all_problems_are_reported_at_once_rules_between_fields_too() -> None:
    found = problems(temprature=1, top_p=7, min_tokens=20, stop=["", 5])
    assert set(found) == {"temprature", "top_p", "min_tokens", "stop.0", "stop.1"}


def test_a_wrong_field_causes_no_further_complaint_about_its_default() -> None:
    # max_tokens falls back to 16 while problems are collected; that must not make min_tokens wrong.
    assert set(problems(max_tokens="many", min_tokens=20)) == {"max_tokens"}
    assert set(problems(temperature="cold", n=2, **{"a.b": 1})) == {"temperature", "a.b"}


def test_the_message_lists_every_problem() -> None:
    with pytest.raises(ParameterError, match=r"(?s)2 problems.*- n: must be at least 1, got 0.*- top_p:"):
        SamplingParams(n=0, top_p=9)


def test_assigning_validates_and_leaves_the_old_value_when_refused() -> None:
    params = SamplingParams(max_tokens=8)
    params.stop = "x"  # type: ignore[assignment]
    assert params.stop == ["x"]
    with pytest.raises(ParameterError, match="min_tokens: must not exceed max_tokens=8, got 9"):
        params.min_tokens = 9
    assert params.min_tokens == 0
    with pytest.raises(ParameterError, match="did you mean 'stop'"):
        params.stopp = "x"  # type: ignore[attr-defined]


def test_replace_returns_a_validated_copy() -> None:
    params = SamplingParams(seed=3, temperature=0.5)
    child = params.replace(seed=4, n=1)
    assert (child.seed, child.temperature, params.seed) == (4, 0.5, 3)
    with pytest.raises(ParameterError):
        params.replace(n=0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-4, False), (1, False)])
def test_greedy_is_temperature_near_zero(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_all_stop_token_ids() -> None:
    assert SamplingParams(stop_token_ids=[3, 2, 3]).all_stop_token_ids == {2, 3}


def test_check_vocabulary_names_each_field_with_ids_outside() -> None:
    params = SamplingParams(logit_bias={99: 1, 100: 1}, allowed_token_ids=[5, 200], stop_token_ids=[7])
    params.check_vocabulary(201)
    with pytest.raises(ParameterError) as caught:
        params.check_vocabulary(100)
    assert {p.path: p.message for p in caught.value.problems} == {
        "allowed_token_ids": "token ids must be below the vocabulary size 100, got [200]",
        "logit_bias": "token ids must be below the vocabulary size 100, got [100]",
    }


def test_no_more_logprobs_than_the_vocabulary_or_the_limit_has() -> None:
    params = SamplingParams(logprobs=100, prompt_logprobs=101)
    params.check_vocabulary(101)
    params.check_logprobs(-1)
    params.check_logprobs(101)
    SamplingParams(logprobs=-1).check_vocabulary(5)
    SamplingParams().check_logprobs(0)
    with pytest.raises(ParameterError) as caught:
        params.check_vocabulary(100)
    assert [str(p) for p in caught.value.problems] == [
        "prompt_logprobs: must not exceed the vocabulary size 100 (-1: all), got 101"
    ]
    with pytest.raises(ParameterError) as caught:
        params.replace(prompt_logprobs=-1).check_logprobs(20)
    rule = "must be at most 20 and not -1, the limit of the configuration's max_logprobs"
    assert [str(p) for p in caught.value.problems] == [
        f"logprobs: {rule}, got 100",
        f"prompt_logprobs: {rule}, got -1",
    ]


@pytest.mark.parametrize(
    ("prompt", "min_tokens", "field"),
    [(0, 0, "prompt"), (100, 0, "prompt"), (101, 0, "prompt"), (90, 11, "min_tokens")],
)
def test_check_context_refuses_what_cannot_fit(prompt: int, min_tokens: int, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(min_tokens=min_tokens).check_context(prompt, 100)
    assert [p.path for p in caught.value.problems] == [field]


def test_check_context_accepts_what_fits() -> None:
    SamplingParams(min_tokens=1).check_context(99, 100)
    SamplingParams(min_tokens=10).check_context(90, 100)


def test_token_limit_is_the_smaller_of_max_tokens_and_room() -> None:
    assert SamplingParams(max_tokens=5).token_limit(90, 100) == 5
    assert SamplingParams(max_tokens=50).token_limit(90, 100) == 10
    assert SamplingParams(max_tokens=None).token_limit(90, 100) == 10


def test_unsupported_names_fields_that_a_sampler_would_ignore() -> None:
    params = SamplingParams(temperature=0.5, top_k=4, min_p=0.1, max_tokens=3, stop="x", seed=None, top_p=1.0)
    assert params.unsupported(frozenset({"temperature", "top_k", "seed"}) | ENGINE_FIELDS) == ["min_p"]
    assert params.unsupported(frozenset()) == ["temperature", "top_k", "min_p", "stop", "max_tokens"]
    assert SamplingParams(top_k=-1, stop=[]).unsupported(frozenset()) == []


def test_engine_fields_exist() -> None:
    assert set(SamplingParams.model_fields) >= ENGINE_FIELDS


def test_json_pickle_and_copies_keep_the_parameters() -> None:
    params = SamplingParams(
        temperature=0.3,
        logit_bias={3: -1},
        stop="x",
        structured_outputs={"json": {"type": "object"}},
        output_kind="final",
    )
    assert SamplingParams.model_validate_json(params.model_dump_json(exclude_defaults=True)) == params
    assert SamplingParams(**params.model_dump()) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params


def test_instances_do_not_share_lists() -> None:
    SamplingParams().stop.append("x")
    assert SamplingParams().stop == []


field_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 5), max_size=3),
)


@given(st.dictionaries(st.sampled_from([*SamplingParams.model_fields, "tempratur"]), field_values, max_size=6))
def test_any_values_make_parameters_or_problems_about_the_given_fields(values: dict[str, Any]) -> None:
    outcome: SamplingParams | ParameterError
    try:
        outcome = SamplingParams(**values)
    except ParameterError as exc:
        outcome = exc
    if isinstance(outcome, SamplingParams):
        assert SamplingParams(**outcome.model_dump()) == outcome
    else:
        assert outcome.problems
        assert {problem.path.partition(".")[0] for problem in outcome.problems} <= set(values)
        assert all(problem.message for problem in outcome.problems)


class TestStructuredOutputs:
    @pytest.mark.parametrize(
        "values",
        [
            {"json": {"type": "object"}},
            {"json": '{"type": "object"}'},
            {"regex": "a|b"},
            {"choice": ["a", "b"]},
            {"grammar": "start: 'a'"},
            {"json_object": True},
            {"json_object": False, "regex": "a"},
            {"structural_tag": {"structures": []}},
        ],
    )
    def test_one_kind_is_accepted(self, values: dict[str, Any]) -> None:
        kind = next(name for name, value in values.items() if value is not False)
        assert StructuredOutputsParams(**values).kind == kind

    @pytest.mark.parametrize(
        ("values", "path", "text"),
        [
            ({"json": {}, "regex": "a"}, "", "got json, regex"),
            ({"json_object": False}, "", "got none"),
            ({"json": "{not json"}, "json", "is not valid JSON"),
            ({"json": "[1]"}, "json", "mapping or JSON text"),
            ({"json": 5}, "json", "got 5"),
            ({"regex": ""}, "regex", "non-empty string"),
            ({"choice": []}, "choice", "non-empty list"),
            ({"choice": ["a", ""]}, "choice", "non-empty strings"),
            ({"choice": "ab"}, "choice", "list"),
            ({"json_object": "yes"}, "json_object", "true or false"),
        ],
    )
    def test_a_wrong_one_is_refused(self, values: dict[str, Any], path: str, text: str) -> None:
        with pytest.raises(ParameterError) as caught:
            StructuredOutputsParams(**values)
        assert [p.path for p in caught.value.problems] == [path]
        assert text in caught.value.problems[0].message


class TestPooling:
    def test_defaults(self) -> None:
        params = PoolingParams()
        assert (params.task, params.dimensions, params.normalize) == ("embed", None, None)
        assert PoolingParams.model_validate_json(params.model_dump_json()) == params

    @pytest.mark.parametrize(
        ("values", "path", "text"),
        [
            ({"task": "embedd"}, "task", "did you mean 'embed'?"),
            ({"dimensions": 0}, "dimensions", "at least 1"),
            ({"task": "score", "dimensions": 5}, "dimensions", "task='embed' only"),
            ({"task": "classify", "normalize": True}, "normalize", "task='embed' only"),
            ({"dimension": 3}, "dimension", "did you mean 'dimensions'?"),
        ],
    )
    def test_rules(self, values: dict[str, Any], path: str, text: str) -> None:
        with pytest.raises(ParameterError) as caught:
            PoolingParams(**values)
        assert [p.path for p in caught.value.problems] == [path]
        assert text in caught.value.problems[0].message


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "must be at least n=3"),
        ({"best_of": 0}, "best_of", "must be at least 1, got 0"),
        ({"best_of": 2, "temperature": 0}, "best_of", "must be 1 with temperature=0"),
        ({"n": 2, "best_of": 3, "output_kind": "delta"}, "best_of", "must equal n=2 when output is streamed"),
    ],
)
def test_choosing_among_outputs_that_cannot_be_is_refused(values: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        SamplingParams(**values)
    assert [problem.path for problem in caught.value.problems] == [field]


def test_as_many_outputs_are_sampled_as_are_chosen_from() -> None:
    assert SamplingParams(n=2, best_of=5).num_sampled == 5
    assert SamplingParams(n=2).num_sampled == 2
    assert SamplingParams(n=2, best_of=2, output_kind="delta").num_sampled == 2
