"""What the README and the other pages promise is there: links, commands, options, code and configurations."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import trivet
from trivet.launcher.app import app
from trivet_schemas.config import EngineConfig

_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]


@pytest.fixture(scope="module")
def readme(repository: Path) -> dict[str, list[str]]:
    """The fenced blocks of the README, by language."""
    blocks: dict[str, list[str]] = {}
    for language, text in _FENCE.findall((repository / "README.md").read_text(encoding="utf-8")):
        blocks.setdefault(language, []).append(text)
    return blocks


def test_every_relative_link_leads_somewhere(repository: Path) -> None:
    pages = [repository / name for name in _PAGES]
    pages += [path for folder in ("docs", "plugins", "examples") for path in (repository / folder).rglob("*.md")]
    broken = [
        f"{page.relative_to(repository)}: {target}"
        for page in pages
        for target in _LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_command_and_option_in_the_readme_exists(readme: dict[str, list[str]]) -> None:
    lines = [
        line for block in readme["console"] for line in re.findall(r"\btrivet (.*?)(?:\s+#.*)?$", block, re.MULTILINE)
    ]
    assert len(lines) > 5
    for line in lines:
        command, words = get_command(app), line.split()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not hasattr(command, "commands"), f"trivet {line}: there is no such command"
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, f"trivet {line}"


def test_the_python_code_in_the_readme_uses_public_names(readme: dict[str, list[str]]) -> None:
    imported = [
        name.name
        for block in readme["python"]
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module == "trivet"
        for name in node.names
    ]
    assert {"LLM", "SamplingParams"} <= set(imported) <= set(trivet.__all__)


def test_the_configuration_in_the_readme_is_valid(readme: dict[str, list[str]]) -> None:
    for block in readme["yaml"]:
        assert EngineConfig(**yaml.safe_load(block)).model


def test_every_example_configuration_is_valid(repository: Path) -> None:
    examples = sorted((repository / "examples").glob("*.yaml"))
    assert repository / "examples" / "quickstart.yaml" in examples
    for path in examples:
        assert EngineConfig(**yaml.safe_load(path.read_text(encoding="utf-8"))).model


def test_the_quickstart_needs_no_argument(repository: Path) -> None:
    config = EngineConfig(**yaml.safe_load((repository / "examples" / "quickstart.yaml").read_text(encoding="utf-8")))
    assert config.model == "demo"
    assert config.generate.prompts


def test_every_tox_environment_that_the_guide_names_exists(repository: Path) -> None:
    guide = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tox = (repository / "tox.ini").read_text(encoding="utf-8")
    environments = set(re.findall(r"^\[testenv:([^\]]+)\]", tox, re.MULTILINE))
    environments |= {"smoke-py312", "smoke-py313"} if "smoke-py3{12,13}" in environments else set()
    named = {name for names in re.findall(r"tox -e ([\w,-]+)", guide) for name in names.split(",")}
    assert named
    assert named <= environments
