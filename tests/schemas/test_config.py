from __future__ import annotations

import pickle
from typing import Any

import pytest

from trivet_schemas.config import EngineConfig, PluginSelection
from trivet_schemas.errors import ConfigError, Place, Problem
from trivet_schemas.sampling import SamplingParams

FLAT = {
    "max_num_seqs": [("scheduler", "max_num_seqs"), ("runner", "max_rows")],
    "enable_prefix_caching": [("cache", "prefix_caching")],
    "swap_space": [("cache_tier", "host_memory")],
}


def problems(**values: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**values)
    return {problem.path: problem.message for problem in caught.value.problems}


def flat_problems(**values: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat({"model": "demo", **values}, FLAT)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_defaults() -> None:
    config = EngineConfig(model="demo")
    assert (config.dtype, config.device, config.seed, config.max_model_len) == ("auto", "auto", 0, None)
    assert not config.trust_remote_code
    assert config.plugins == {}
    assert config.generate.sampling == SamplingParams()
    assert config.served_names == ["demo"]
    assert config.source is None
    assert config.locate("model") == Place()


@pytest.mark.parametrize(("given", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtype_aliases(given: Any, dtype: str) -> None:
    assert EngineConfig(model="demo", dtype=given).dtype == dtype


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3", "xpu:0", "mps"])
def test_devices(device: str) -> None:
    assert EngineConfig(model="demo", device=device).device == device


@pytest.mark.parametrize(
    ("values", "path", "text"),
    [
        ({"modle": "x"}, "modle", "did you mean 'model'?"),
        ({"model": ""}, "model", "must not be empty"),
        ({"model": None}, "model", "must be a string, got None"),
        ({"dtype": "fp16"}, "dtype", "must be one of"),
        ({"dtype": 16}, "dtype", "got 16"),
        ({"device": "gpu:1"}, "device", "did you mean 'cuda:1'?"),
        ({"device": "cuda:x"}, "device", "a device like"),
        ({"seed": True}, "seed", "whole number, got True"),
        ({"seed": "x"}, "seed", "whole number, got 'x'"),
        ({"max_model_len": 0}, "max_model_len", "at least 1, got 0"),
        ({"trust_remote_code": "maybe"}, "trust_remote_code", "true or false"),
        ({"revision": 12}, "revision", "put quotes around it"),
        ({"served_model_name": []}, "served_model_name", "empty"),
        ({"plugins": "paged"}, "plugins", "must be a mapping, got 'paged'"),
        ({"plugins": {"cache": 5}}, "plugins.cache", "name of a plugin, or a mapping with 'use'"),
        ({"plugins": {"cache": None}}, "plugins.cache", "got None"),
        ({"plugins": {"cache": {"use": 3}}}, "plugins.cache.use", "must be the name of a plugin, got 3"),
        ({"plugins": {"cache": {"use": "x", 5: 1}}}, "plugins.cache.5", "named by strings"),
        ({"plugins": {"cache_tier": ["offload", 5]}}, "plugins.cache_tier.1", "got 5"),
        ({"plugins": {"my role": "x"}}, "plugins.my role", "a role is a word"),
        ({"generate": {"promts": []}}, "generate.promts", "did you mean 'prompts'?"),
        ({"generate": {"prompts": ["a", ""]}}, "generate.prompts.1", "empty"),
        ({"generate": {"prompts": "a"}}, "generate.prompts", "must be a list"),
        ({"generate": {"sampling": 5}}, "generate.sampling", "must be a mapping"),
        ({"generate": {"sampling": {5: 1}}}, "generate.sampling.5", "named by a string"),
        ({"generate": {"sampling": {"tempratur": 1}}}, "generate.sampling.tempratur", "did you mean 'temperature'?"),
        ({"generate": {"sampling": {"min_tokens": 99}}}, "generate.sampling.min_tokens", "max_tokens=16"),
        ({"serve": 8000}, "serve", "must be a mapping, got 8000"),
        ({"max_logprobs": -2}, "max_logprobs", "at least -1, got -2"),
        ({"recent_steps": 0}, "recent_steps", "at least 1, got 0"),
        ({"watchdog": 300}, "watchdog", "must be a mapping, got 300"),
        ({"watchdog": {"seconds": 0}}, "watchdog.seconds", "0"),
        ({"watchdog": {"seconds": float("inf")}}, "watchdog.seconds", "inf"),
        ({"watchdog": {"dump": ""}}, "watchdog.dump", "empty"),
        ({"watchdog": {"second": 5}}, "watchdog.second", "did you mean 'seconds'?"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(values: dict[str, Any], path: str, text: str) -> None:
    found = problems(**{"model": "demo", **values})
    assert list(found) == [path]
    assert text in found[path]


def test_a_watchdog_gives_up_after_five_minutes_unless_it_is_switched_off() -> None:
    assert (EngineConfig(model="demo").watchdog.seconds, EngineConfig(model="demo").recent_steps) == (300, 1024)
    assert EngineConfig(model="demo", watchdog={"seconds": None}).watchdog.seconds is None


@pytest.mark.parametrize("off", [False, None])
def test_false_or_null_switches_the_watchdog_off(off: Any) -> None:
    assert EngineConfig(model="demo", watchdog=off).watchdog.seconds is None
    with pytest.raises(ConfigError, match="watchdog: must be a mapping, got True"):
        EngineConfig(model="demo", watchdog=True)


def test_the_model_is_required_and_all_problems_are_reported() -> None:
    found = problems(seed="x", plugins={"cache": 5}, generate={"sampling": {"n": 0, "top_p": 9}})
    assert set(found) == {"model", "seed", "plugins.cache", "generate.sampling.n", "generate.sampling.top_p"}
    assert found["model"] == "is required, and missing"


class TestPlugins:
    def test_the_short_form_names_the_plugin(self) -> None:
        config = EngineConfig(model="demo", plugins={"cache": "paged"})  # type: ignore[dict-item]
        assert config.selections("cache") == [PluginSelection(use="paged")]

    def test_keys_besides_use_are_options_even_one_called_options(self) -> None:
        plugins: Any = {"cache": {"use": "paged", "block_size": 8, "options": 1}, "attention": {"threads": 2}}
        config = EngineConfig(model="demo", plugins=plugins)
        assert config.selections("cache") == [PluginSelection(use="paged", options={"block_size": 8, "options": 1})]
        assert config.selections("attention") == [PluginSelection(use="auto", options={"threads": 2})]

    def test_lists_keep_their_order(self) -> None:
        plugins: Any = {"logits_processor": ["a", {"use": "b", "key": 7}]}
        config = EngineConfig(model="demo", plugins=plugins)
        assert [(s.use, s.options) for s in config.selections("logits_processor")] == [("a", {}), ("b", {"key": 7})]
        assert config.selections("drafter") == []

    def test_a_dump_is_in_the_form_of_the_file_and_loads_again(self) -> None:
        plugins: Any = {"cache": {"use": "paged", "block_size": 8}, "cache_tier": ["offload"]}
        config = EngineConfig(model="demo", plugins=plugins, generate={"sampling": {"seed": 1}})  # type: ignore[arg-type]
        dumped = config.model_dump()
        assert dumped["plugins"] == {"cache": {"use": "paged", "block_size": 8}, "cache_tier": [{"use": "offload"}]}
        assert EngineConfig(**dumped) == config
        assert EngineConfig.model_validate_json(config.model_dump_json()) == config
        assert pickle.loads(pickle.dumps(config)) == config


class TestFlat:
    def test_a_flat_argument_sets_every_option_that_declares_it(self) -> None:
        config = EngineConfig.from_flat({"model": "demo", "max_num_seqs": 4, "enable_prefix_caching": False}, FLAT)
        assert config.model_dump()["plugins"] == {
            "scheduler": {"use": "auto", "max_num_seqs": 4},
            "runner": {"use": "auto", "max_rows": 4},
            "cache": {"use": "auto", "prefix_caching": False},
        }

    def test_it_joins_the_plugin_that_was_chosen(self) -> None:
        plugins = {"scheduler": "static", "cache": PluginSelection(use="paged"), "cache_tier": ["offload"]}
        values = {
            "model": "demo",
            "plugins": plugins,
            "max_num_seqs": 4,
            "enable_prefix_caching": True,
            "swap_space": 1,
        }
        config = EngineConfig.from_flat(values, FLAT)
        assert config.selections("scheduler") == [PluginSelection(use="static", options={"max_num_seqs": 4})]
        assert config.selections("cache") == [PluginSelection(use="paged", options={"prefix_caching": True})]
        assert config.plugins["cache_tier"] == [PluginSelection(use="offload", options={"host_memory": 1})]
        assert plugins["scheduler"] == "static"

    def test_an_unknown_name_is_compared_with_keys_and_flat_names(self) -> None:
        found = flat_problems(max_num_seq=1, sed=2, seed="x")
        assert found["max_num_seq"] == "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"
        assert found["sed"] == "unknown key 'sed'; did you mean 'seed'?"
        assert found["seed"] == "must be a whole number, got 'x'"

    def test_the_same_option_twice_is_a_clash(self) -> None:
        found = flat_problems(enable_prefix_caching=False, plugins={"cache": {"prefix_caching": True}})
        message = found["enable_prefix_caching"]
        assert message == (
            "is given twice, as enable_prefix_caching=False and as plugins.cache.prefix_caching=True; keep one"
        )

    def test_with_several_plugins_the_one_that_is_meant_must_be_named(self) -> None:
        found = flat_problems(swap_space=4, plugins={"cache_tier": ["a", "b"]})
        assert "plugins.cache_tier lists 2 plugins" in found["swap_space"]

    def test_plugins_of_the_wrong_shape_are_reported_as_such(self) -> None:
        assert list(flat_problems(max_num_seqs=4, plugins=7)) == ["plugins"]
        assert list(flat_problems(max_num_seqs=4, plugins={"scheduler": 7})) == ["plugins.scheduler"]


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        EngineConfig(model="demo").seed = 3  # type: ignore[misc]


def test_errors_about_a_configuration_made_in_python_have_no_place() -> None:
    error = EngineConfig(model="demo").error(Problem("plugins.cache", "no"))
    assert str(error) == "plugins.cache: no"
