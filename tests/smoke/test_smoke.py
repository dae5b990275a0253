"""What works before a deep learning library is needed; run where none is installed, on every supported Python."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import trivet


def _trivet(*arguments: str, code: int = 0) -> str:
    command = shutil.which("trivet", path=sysconfig.get_path("scripts"))
    assert command is not None
    result = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_there_is_no_deep_learning_library_here(library: str) -> None:
    assert importlib.util.find_spec(library) is None


def test_every_public_name_can_be_imported() -> None:
    assert {"LLM", "SamplingParams", "Engine", "AsyncEngine"} <= set(trivet.__all__)
    for name in trivet.__all__:
        assert getattr(trivet, name) is not None


def test_every_bundled_plugin_loads() -> None:
    loaded = {point.name for point in entry_points(group="trivet") if point.load()}
    assert {"continuous", "paged", "transformers", "torch_runner"} <= loaded


def test_help_names_the_commands() -> None:
    text = _trivet("--help")
    for command in ("generate", "chat", "plugins", "config"):
        assert command in text


def test_the_version_is_the_one_installed() -> None:
    assert trivet.__version__ in _trivet("--version")


def test_plugins_are_listed() -> None:
    text = _trivet("plugins", "list")
    for name in ("continuous", "static", "paged", "contiguous", "offload", "inline", "transformers", "sampler"):
        assert name in text


def test_the_schema_covers_the_options_of_the_plugins() -> None:
    schema = _trivet("config", "schema")
    assert json.loads(schema)["type"] == "object"
    assert "max_num_batched_tokens" in schema


def test_a_misspelt_key_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("modle: demo\n", encoding="utf-8")
    text = _trivet("config", "check", str(config), code=2)
    assert "modle" in text
    assert "model" in text
