from __future__ import annotations

import pickle

import pytest

from trivet_schemas.errors import (
    ConfigError,
    ParameterError,
    Place,
    Problem,
    SchemaError,
    join_path,
    show,
    suggestion,
    unknown_name,
)


def test_one_problem_is_one_line_with_file_and_place() -> None:
    error = ConfigError(Problem("plugins.cache.block_size", "must be at least 1, got 0", line=7), "c.yaml")
    assert str(error) == "c.yaml: plugins.cache.block_size (line 7): must be at least 1, got 0"


def test_an_override_is_named_as_the_place() -> None:
    problem = Problem("seed", "must be a whole number, got 'x'", override="seed=x")
    assert str(problem) == "seed (from --set seed=x): must be a whole number, got 'x'"


def test_several_problems_are_a_list() -> None:
    error = ParameterError([Problem("n", "a"), Problem("", "b", line=2)])
    assert str(error) == "2 problems with the request:\n  - n: a\n  - b (line 2)"


@pytest.mark.parametrize("kind", [ParameterError, ConfigError])
def test_errors_are_value_errors_that_survive_pickling(kind: type[SchemaError]) -> None:
    error = kind("no", "c.yaml")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ValueError)
    assert (type(again), str(again), again.problems, again.exit_code) == (kind, "c.yaml: no", error.problems, 2)


def test_a_problem_moves_under_a_path_and_keeps_a_place_it_knows() -> None:
    problem = Problem("use", "x").under("plugins.cache").at(Place(3))
    assert (problem.path, problem.line) == ("plugins.cache.use", 3)
    assert problem.at(Place(override="a=b")) == problem
    assert Problem("", "x").under("plugins").path == "plugins"


def test_join_path_leaves_out_empty_parts() -> None:
    assert join_path("", "plugins", 0, "use") == "plugins.0.use"


def test_show_cuts_long_values_in_the_middle() -> None:
    assert show("abc") == "'abc'"
    text = show("x" * 500 + "end")
    assert len(text) <= 80
    assert text.endswith("end'")


@pytest.mark.parametrize(
    ("name", "near"), [("shceduler", "scheduler"), ("Cache", "cache"), ("cache-tier", "cache_tier"), ("zzz", None)]
)
def test_suggestion(name: str, near: str | None) -> None:
    assert suggestion(name, ["scheduler", "cache", "cache_tier"]) == near


def test_unknown_name_lists_what_is_known_when_nothing_is_near() -> None:
    assert unknown_name("role", "zzz", ["b", "a"]) == "unknown role 'zzz'; known: a, b"
    assert unknown_name("option", "zzz", []) == "unknown option 'zzz'; none is accepted here"
    assert unknown_name("key", "q", [f"word{i:02}" for i in range(50)]).endswith("word48, word49")
    assert unknown_name("key", "q", [f"word{i:03}" for i in range(200)]).endswith("word063, ...")


def test_unknown_name_says_what_to_do_instead_or_hints() -> None:
    remedies = {"red": "use green"}
    assert unknown_name("field", "red", ["reds"], remedies=remedies) == "unknown field 'red'; use green"
    assert unknown_name("key", "zzz", ["a"], remedies=remedies, hint="ask") == "unknown key 'zzz'; known: a; ask"
    assert unknown_name("key", "aab", ["aaa"], hint="ask") == "unknown key 'aab'; did you mean 'aaa'?"
