from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet_schemas._overrides import apply_override, parse_overrides
from trivet_schemas._yaml import read_yaml
from trivet_schemas.config import EngineConfig
from trivet_schemas.errors import ConfigError, Place
from trivet_schemas.yaml_io import config_from_overrides, load_config_file

FLAT = {
    "max_num_seqs": [("scheduler", "max_num_seqs")],
    "enable_prefix_caching": [("cache", "prefix_caching")],
    "block_size": [("cache", "block_size")],
}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write a text to a file and load it."""

    def load(text: str, *overrides: str) -> EngineConfig:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config_file(path, overrides, FLAT)

    return load


@pytest.fixture
def fail(load: Any) -> Any:
    """The problems of a text that does not load."""

    def fail(text: str, *overrides: str) -> list[Any]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert caught.value.source.endswith("config.yaml")
        return list(caught.value.problems)

    return fail


EXAMPLE = """\
model: Qwen/Qwen3-0.6B   # a comment
dtype: bfloat16
plugins:
  scheduler: {use: continuous, max_num_batched_tokens: 2048, policy: fcfs}
  cache:
    use: paged
    block_size: 16
    memory: 4GiB
  cache_tier: [{use: offload, host_memory: 8GiB}]
  attention: auto
generate:
  prompts: ["The capital of France is"]
  sampling: {temperature: 0, max_tokens: 32, logit_bias: {50256: -100}}
serve: {port: 8000}
"""


class TestFile:
    def test_an_example(self, load: Any) -> None:
        config = load(EXAMPLE)
        assert config.model == "Qwen/Qwen3-0.6B"
        assert config.selections("cache")[0].options == {"block_size": 16, "memory": "4GiB"}
        assert config.selections("cache_tier")[0].use == "offload"
        assert config.generate.sampling.greedy
        assert config.generate.sampling.logit_bias == {50256: -100}
        assert config.serve == {"port": 8000}
        assert config.source.endswith("config.yaml")
        assert config.notes == ()

    def test_places(self, load: Any) -> None:
        config = load(EXAMPLE, "seed=3")
        assert config.locate("plugins.cache.memory") == Place(8)
        assert config.locate("plugins.cache.unheard_of") == Place(5)
        assert config.locate("plugins.cache_tier.0.use") == Place(9)
        assert config.locate("seed") == Place(override="seed=3")
        assert config.locate("revision") == Place()

    def test_a_later_error_about_an_option_has_file_and_line(self, load: Any) -> None:
        from trivet_schemas.options import Options
        from trivet_schemas.validation import validate_options

        class Cache(Options):
            block_size: str = "x"

        config = load(EXAMPLE)
        with pytest.raises(ConfigError) as caught:
            validate_options(Cache, config.selections("cache")[0].options, "plugins.cache")
        located = config.error(caught.value.problems)
        assert "config.yaml: 2 problems" in str(located)
        assert "plugins.cache.block_size (line 7): must be a string, got 16" in str(located)
        assert "plugins.cache.memory (line 8): unknown key 'memory'" in str(located)

    def test_a_missing_file_suggests_a_neighbour(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").touch()
        with pytest.raises(ConfigError, match=r"cofnig.yaml: no such file; did you mean '.*/config.yaml'\?"):
            load_config_file(tmp_path / "cofnig.yaml")
        with pytest.raises(ConfigError, match=r"nowhere/a.yaml: no such file$"):
            load_config_file(tmp_path / "nowhere" / "a.yaml")

    def test_a_folder_suggests_a_file_in_it(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is a directory; name a YAML file$"):
            load_config_file(tmp_path)
        (tmp_path / "a.yaml").touch()
        with pytest.raises(ConfigError, match=r"is a directory; name a YAML file, such as '.*/a.yaml'$"):
            load_config_file(str(tmp_path))

    def test_a_path_through_a_file_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").touch()
        with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
            load_config_file(tmp_path / "a.yaml" / "b.yaml")

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_bytes(b"model: \xff")
        with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 7"):
            load_config_file(tmp_path / "a.yaml")

    def test_a_byte_order_mark_is_no_obstacle(self, load: Any) -> None:
        assert load("\ufeffmodel: demo").model == "demo"

    @pytest.mark.parametrize("text", ["", "\n", "# nothing but a comment\n", "---\n"])
    def test_an_empty_file(self, fail: Any, text: str) -> None:
        assert "is empty" in fail(text)[0].message

    @pytest.mark.parametrize("text", ["[1, 2]", "model", "5", "- model: demo"])
    def test_no_mapping(self, fail: Any, text: str) -> None:
        assert "must hold keys and values" in fail(text)[0].message


class TestSyntax:
    def test_an_error_shows_line_column_and_the_line(self, fail: Any) -> None:
        (problem,) = fail("model: demo\na: b: c\n")
        assert problem.message.splitlines() == [
            "not valid YAML at line 2, column 5: mapping values are not allowed here",
            "    a: b: c",
            "        ^",
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("model: demo\n\tseed: 1\n", "indent with spaces"),
            ("model: [demo", "expected ',' or ']'"),
            ("model: 'demo", "quoted scalar"),
            ("model: *nowhere", "undefined alias"),
            ("model: !!python/object:os.system x", "python/object"),
            ("model: !!set {a, b}", "unknown tag"),
            ("model: demo\n---\nmodel: x", "another document"),
            ("model: &a [*a]", "an alias contains itself"),
            ("model: \x07", "special characters"),
            ('model: "\\ud83d"', "half of a surrogate pair"),
            ("{[a]: b}", "keys must be plain text"),
        ],
    )
    def test_kinds(self, fail: Any, text: str, message: str) -> None:
        assert message in fail(text)[0].message

    def test_aliases_that_expand_without_end_are_refused(self, fail: Any) -> None:
        levels = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 9))
        assert "too many values" in fail(f"model: demo\nl0: &l0 [x]\n{levels}")[0].message

    def test_equal_keys_are_named_with_both_lines(self, fail: Any) -> None:
        found = fail("model: a\nplugins:\n  cache: {use: a,\n    use: b}\nmodel: c\n")
        assert [(p.path, p.line, p.message) for p in found] == [
            ("plugins.cache.use", 4, "is given twice, first in line 3; keep one"),
            ("model", 5, "is given twice, first in line 1; keep one"),
        ]

    def test_merge_keys_and_aliases_work(self, load: Any) -> None:
        config = load("model: demo\nplugins:\n  a: &x {use: p, k: 1}\n  b: {<<: *x, k: 2}\n  c: *x\n")
        assert config.model_dump()["plugins"]["b"] == {"use": "p", "k": 2}
        changed = load("model: demo\nplugins:\n  a: &x {use: p, k: 1}\n  c: *x\n", "plugins.a.k=5")
        assert changed.model_dump()["plugins"] == {"a": {"use": "p", "k": 5}, "c": {"use": "p", "k": 1}}

    def test_every_problem_has_its_line(self, fail: Any) -> None:
        found = fail(
            "seed: x\nplugins:\n  cache: 5\n  b:\n    - a\n    - {use: 3}\ngenerate:\n  sampling:\n    top_p: 7\n"
        )
        assert {(p.path, p.line) for p in found} == {
            ("model", None),
            ("seed", 1),
            ("plugins.cache", 3),
            ("plugins.b.1.use", 6),
            ("generate.sampling.top_p", 9),
        }

    def test_keys_are_text_as_written(self, fail: Any) -> None:
        assert [p.path for p in fail("model: demo\non: 1\n0x1F: 2\n")] == ["on", "0x1F"]

    @pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("2E5", 2e5), ("1.0e-3", 0.001), (".5e1", 5.0)])
    def test_floats_without_a_dot_are_numbers(self, text: str, value: float) -> None:
        assert read_yaml(f"x: {text}").value == {"x": value}


class TestFlat:
    def test_false_is_off(self, load: Any) -> None:
        config = load("model: demo\nenable_prefix_caching: false\n")
        assert config.selections("cache")[0].options == {"prefix_caching": False}
        assert config.locate("plugins.cache.prefix_caching") == Place(2)

    def test_a_clash_names_the_line(self, fail: Any) -> None:
        (problem,) = fail("model: demo\nplugins: {cache: {block_size: 8}}\nblock_size: 16\n")
        assert (problem.path, problem.line) == ("block_size", 3)
        assert "is given twice" in problem.message

    def test_the_command_line_wins_in_whichever_form(self, load: Any) -> None:
        for text in ("block_size: 8", "plugins: {cache: {block_size: 8}}", "plugins: {cache: paged}"):
            for override in ("block_size=32", "plugins.cache.block_size=32"):
                config = load(f"model: demo\n{text}\n", override)
                assert config.selections("cache")[0].options == {"block_size": 32}
                assert config.locate("plugins.cache.block_size") == Place(override=override)

    def test_an_unknown_key_suggests_flat_names_too(self, fail: Any) -> None:
        (problem,) = fail("model: demo\nmax_num_seq: 3\n")
        assert (problem.line, problem.message) == (2, "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?")

    def test_a_flat_argument_stays_when_the_plugin_changes(self, load: Any) -> None:
        config = load("model: demo\nmax_num_seqs: 3\n", "plugins.scheduler.use=static")
        assert config.model_dump()["plugins"]["scheduler"] == {"use": "static", "max_num_seqs": 3}


class TestOverrides:
    @pytest.mark.parametrize(
        ("section", "expected"),
        [
            ("", {"use": "static"}),
            ("plugins:", {"use": "static"}),
            ("plugins: {scheduler: continuous}", {"use": "static"}),
            ("plugins: {scheduler: {use: continuous}}", {"use": "static"}),
            ("plugins: {scheduler: {use: static, max_num_seqs: 3}}", {"use": "static", "max_num_seqs": 3}),
        ],
    )
    @pytest.mark.parametrize("override", ["plugins.scheduler.use=static", "plugins.scheduler.use = static"])
    def test_selecting_a_plugin(self, load: Any, section: str, expected: Any, override: str) -> None:
        config = load(f"model: demo\n{section}\n", override)
        assert config.model_dump()["plugins"]["scheduler"] == expected
        assert config.notes == ()

    @pytest.mark.parametrize("override", ["plugins.scheduler.use=static", "plugins.scheduler=static"])
    def test_another_plugin_drops_the_options_of_the_former_one_and_says_so(self, load: Any, override: str) -> None:
        config = load(EXAMPLE, override)
        assert config.model_dump()["plugins"]["scheduler"] == {"use": "static"}
        assert config.notes == (
            f"plugins.scheduler: --set {override} drops the options of 'continuous': max_num_batched_tokens, policy",
        )

    def test_options_on_the_command_line_belong_to_the_plugin_chosen_there(self, load: Any) -> None:
        for order in (1, -1):
            overrides = ["plugins.scheduler.max_num_seqs=4", "plugins.scheduler.use=static"][::order]
            config = load(EXAMPLE, *overrides)
            assert config.model_dump()["plugins"]["scheduler"] == {"use": "static", "max_num_seqs": 4}

    def test_a_whole_section_replaces_the_former(self, load: Any) -> None:
        config = load(EXAMPLE, "plugins.cache={use: paged, block_size: 4}")
        assert config.model_dump()["plugins"]["cache"] == {"use": "paged", "block_size": 4}
        assert "drops the options of 'paged': memory" in config.notes[0]

    def test_an_index_changes_or_appends(self, load: Any) -> None:
        config = load(EXAMPLE, "plugins.cache_tier.0.host_memory=1GiB", "plugins.cache_tier.1.use=disk")
        tiers = config.model_dump()["plugins"]["cache_tier"]
        assert tiers == [{"use": "offload", "host_memory": "1GiB"}, {"use": "disk"}]
        assert load("model: demo", "plugins.cache_tier.0=offload").plugins["cache_tier"][0].use == "offload"
        single = load("model: demo\nplugins: {cache_tier: offload}", "plugins.cache_tier.0.k=1")
        assert single.model_dump()["plugins"]["cache_tier"] == [{"use": "offload", "k": 1}]

    def test_the_plugin_of_one_list_entry_changes(self, load: Any) -> None:
        config = load(EXAMPLE, "plugins.cache_tier.0.use=disk")
        assert config.model_dump()["plugins"]["cache_tier"] == [{"use": "disk"}]
        assert "plugins.cache_tier.0: " in config.notes[0]

    @pytest.mark.parametrize(
        ("override", "read"),
        [
            ("seed=7", lambda c: c.seed == 7),
            ("max_model_len=", lambda c: c.max_model_len is None),
            ("trust_remote_code=true", lambda c: c.trust_remote_code is True),
            ("tokenizer=a=b", lambda c: c.tokenizer == "a=b"),
            ("generate.prompts=[a, b]", lambda c: c.generate.prompts == ["a", "b"]),
            ("generate.prompts.0=Hi", lambda c: c.generate.prompts == ["Hi"]),
            ("generate.sampling.temperature=0.5", lambda c: c.generate.sampling.temperature == 0.5),
            ("generate.sampling.logit_bias.5=1", lambda c: c.generate.sampling.logit_bias[5] == 1),
            ("serve.port=9", lambda c: c.serve["port"] == 9),
            ("plugins={}", lambda c: c.plugins == {}),
        ],
    )
    def test_values_are_yaml(self, load: Any, override: str, read: Any) -> None:
        assert read(load(EXAMPLE, override))

    def test_the_last_one_wins(self, load: Any) -> None:
        assert load("model: demo", "seed=1", "seed=2").seed == 2

    @pytest.mark.parametrize(
        ("override", "path", "message"),
        [
            ("seed", "", "path.to.key=value"),
            ("=3", "", "path.to.key=value"),
            ("a..b=3", "", "path.to.key=value"),
            ("sead=3", "sead", "did you mean 'seed'?"),
            ("foo.bar=3", "foo", "unknown key 'foo'"),
            ("seed=[1", "seed", "is not valid YAML"),
            ("seed=x", "seed", "whole number, got 'x'"),
            ("model.x=1", "model.x", "model is 'Qwen/Qwen3-0.6B', not a section"),
            ("plugins.cache_tier.use=x", "plugins.cache_tier.use", "must be an index, not 'use'"),
            ("plugins.cache_tier.5=x", "plugins.cache_tier.5", "the next index is 1, got 5"),
            ("plugins.cache=7", "plugins.cache", "got 7"),
            ("generate.sampling.tmperature=1", "generate.sampling.tmperature", "did you mean 'temperature'?"),
        ],
    )
    def test_a_wrong_one_is_quoted(self, fail: Any, override: str, path: str, message: str) -> None:
        (problem,) = fail(EXAMPLE, override)
        assert (problem.path, problem.override, problem.line) == (path, override, None)
        assert message in problem.message

    def test_wrong_overrides_and_wrong_lines_are_reported_together(self, fail: Any) -> None:
        found = fail("model: demo\nsede: 1\n", "seed", "dtype=fp16")
        assert {(p.path, p.line, p.override) for p in found} == {
            ("sede", 2, None),
            ("", None, "seed"),
            ("dtype", None, "dtype=fp16"),
        }


def test_overrides_alone_make_a_configuration() -> None:
    flat = {"max_num_seqs": [("scheduler", "max_num_seqs")]}
    config = config_from_overrides(["model=demo", "max_num_seqs=8", "plugins.scheduler.use=static"], flat)
    assert (config.model, config.source) == ("demo", None)
    (scheduler,) = config.selections("scheduler")
    assert (scheduler.use, scheduler.options) == ("static", {"max_num_seqs": 8})
    with pytest.raises(ConfigError, match="model: is required") as caught:
        config_from_overrides(["max_num_seqs=8"], flat)
    assert caught.value.source is None


words = st.sampled_from(["a", "b", "use", "plugins", "scheduler", "0", "1", "generate", "prompts"])
trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(words, trees, max_size=3), st.lists(words, min_size=1, max_size=4), st.integers())
def test_an_override_can_be_read_back_or_changes_nothing(values: dict[str, Any], parts: list[str], value: int) -> None:
    (override,), wrong = parse_overrides([f"{'.'.join(parts)}={value}"])
    assert wrong == []
    before = repr(values)
    try:
        apply_override(values, override)
    except LookupError:
        assert repr(values) == before
    else:
        here: Any = values
        for part in parts:
            here = here[int(part)] if isinstance(here, list) else here[part]
        assert here == value


@given(st.dictionaries(st.text("abc_", min_size=1, max_size=5), st.integers() | st.booleans() | st.text(max_size=5)))
def test_json_mappings_read_as_themselves(values: dict[str, Any]) -> None:
    import json

    document = read_yaml(json.dumps(values))
    assert document.problems == []
    assert document.value == values
    assert set(document.lines) == set(values)


@given(st.text(max_size=30))
def test_any_text_is_a_document_or_has_problems(text: str) -> None:
    document = read_yaml(text)
    assert all(problem.message for problem in document.problems)
    assert document.value is None or not document.problems
