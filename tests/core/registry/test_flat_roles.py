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
