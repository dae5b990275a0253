"""An optional role's name is a flat argument that chooses its provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trivet.registry import known_flat_names
from trivet_schemas.config import EngineConfig, PluginSelection
from trivet_schemas.errors import ConfigError
from trivet_schemas.yaml_io import config_from_overrides, load_config_file


def flat(**values: Any) -> EngineConfig:
    return EngineConfig.from_flat({"model": "demo", **values}, known_flat_names())


def test_quantization_is_named_as_in_other_engines(tmp_path: Path) -> None:
    assert [s.use for s in flat(quantization="int8").selections("quantization")] == ["int8"]
    assert flat(quantization=None).selections("quantization") == []
    assert flat().selections("quantization") == []
    file = tmp_path / "config.yaml"
    file.write_text("model: demo\nquantization: int8\n")
    config = load_config_file(file, known_flat=lambda section: known_flat_names((), section))
    assert [s.use for s in config.selections("quantization")] == ["int8"]


def test_the_short_form_goes_with_options_but_not_with_another_choice() -> None:
    config = flat(connector="disagg", plugins={"connector": {"port": 1}})
    assert [(s.use, s.options) for s in config.selections("connector")] == [("disagg", {"port": 1})]
    with pytest.raises(ConfigError, match=r"quantization: is given twice"):
        flat(quantization="int8", plugins={"quantization": {"use": "int4"}})


def test_a_role_that_every_engine_has_is_chosen_under_plugins() -> None:
    with pytest.raises(ConfigError, match="attention"):
        flat(attention="torch")


def test_a_role_name_in_an_override_chooses_the_provider() -> None:
    config = config_from_overrides(["model=demo", "quantization=int4"], lambda section: known_flat_names((), section))
    assert [s.use for s in config.selections("quantization")] == ["int4"]


def test_a_role_name_in_an_override_replaces_the_files_provider_and_drops_its_options(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: demo\nplugins: {quantization: {use: int8, group: 64}}\n")
    overrides = ["plugins.quantization.lm_head=false", "quantization=int4"]
    config = load_config_file(path, overrides, lambda section: known_flat_names((), section))
    assert config.selections("quantization") == [PluginSelection(use="int4", options={"lm_head": False})]
    assert "drops the options of 'int8': group" in config.notes[0]


def load(tmp_path: Path, text: str, *overrides: str) -> EngineConfig:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: demo\n{text}\n")
    return load_config_file(path, overrides, lambda section: known_flat_names((), section))


@pytest.mark.parametrize(
    "override", ["quantization=int4", "plugins.quantization=int4", "plugins.quantization.use=int4"]
)
@pytest.mark.parametrize("text", ["quantization: int8", "plugins: {quantization: int8}", "quantization: null"])
def test_the_command_line_wins_over_the_file_in_whichever_form(tmp_path: Path, text: str, override: str) -> None:
    config = load(tmp_path, text, override)
    assert config.selections("quantization") == [PluginSelection(use="int4")]
    assert config.notes == ()
    assert config.locate("plugins.quantization.use").override == override


@pytest.mark.parametrize(
    "override", ["quantization=null", "plugins.quantization=null", "plugins.quantization.use=null"]
)
@pytest.mark.parametrize(
    "text",
    ["quantization: int8", "plugins: {quantization: int8}", "plugins: {quantization: {use: int8, group: 32}}", ""],
)
def test_null_on_the_command_line_switches_the_files_choice_off(tmp_path: Path, text: str, override: str) -> None:
    assert load(tmp_path, text, override).plugins == {}


def test_null_in_the_file_chooses_nothing_and_contradicts_a_choice(tmp_path: Path) -> None:
    assert load(tmp_path, "quantization: null").plugins == {}
    with pytest.raises(ConfigError, match=r"given twice, as quantization=None and as plugins"):
        load(tmp_path, "quantization: null\nplugins: {quantization: int8}")


def test_the_last_choice_on_the_command_line_wins_in_whichever_form(tmp_path: Path) -> None:
    forms = ["quantization=int8", "plugins.quantization=int4"]
    assert load(tmp_path, "", *forms).selections("quantization") == [PluginSelection(use="int4")]
    assert load(tmp_path, "", *reversed(forms)).selections("quantization") == [PluginSelection(use="int8")]
    assert load(tmp_path, "", *forms, "quantization=null").plugins == {}


FLAT = [(name, role, option) for name, targets in known_flat_names().items() for role, option in targets]


@pytest.mark.parametrize(("name", "role", "option"), FLAT, ids=[f"{name}-{role}" for name, role, _ in FLAT])
def test_no_flat_argument_is_given_twice_by_file_and_command_line(
    tmp_path: Path, name: str, role: str, option: str
) -> None:
    nested = f"plugins: {{{role}: {{{option}: a}}}}"
    for text in (f"{name}: a", nested):
        for override in (f"{name}=b", f"plugins.{role}.{option}=b", f"plugins.{role}={{{option}: b}}"):
            (selection,) = load(tmp_path, text, override).selections(role)
            assert (selection.use if option == "use" else selection.options) == (
                "b" if option == "use" else {option: "b"}
            )
