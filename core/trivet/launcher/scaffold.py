"""``trivet plugins new``: writes a package with a plugin that works, and tests that show it."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from trivet.errors import TrivetError

EXTENSION = "extension"
_NAME = re.compile(r"[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]")
_SUITES = {
    "scheduler": "SchedulerSuite",
    "cache": "CacheSuite",
    "cache_tier": "CacheTierSuite",
    "executor": "ExecutorSuite",
    "runner": "RunnerSuite",
    "model": "ModelSuite",
    "attention": "AttentionSuite",
    "sampler": "SamplerSuite",
    "logits_processor": "LogitsProcessorSuite",
    "tokenizer": "TokenizerSuite",
}
_SUMMARIES = {
    "scheduler": "A scheduler: first come, first served.",
    "cache": "A KV cache: blocks on demand.",
    "cache_tier": "A tier for evicted KV blocks.",
    "executor": "An executor: one worker in a thread.",
    "runner": "A runner over Trivet's step logic.",
    "model": "A tiny random model.",
    "attention": "Paged attention in plain PyTorch.",
    "quantization": "Int8 weights with a scale per row.",
    "sampler": "A sampler: greedy, or by temperature.",
    "logits_processor": "A logits processor: requests ban tokens.",
    "grammar": "Structured output: one of several texts.",
    "drafter": "A drafter: what followed before.",
    "connector": "A connector for KV blocks.",
    "tokenizer": "A tokenizer of bytes.",
    "frontend": "A front end: answers its own prompts.",
    EXTENSION: "A wrapper of the sampling phase, and an observer.",
}


def roles() -> list[str]:
    """What a plugin can be written for."""
    return list(_SUMMARIES)


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The distribution's name, such as my-scheduler.")],
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help=f"One of {', '.join(_SUMMARIES)}.")],
    path: Annotated[
        Path, typer.Option("--path", metavar="DIR", help="Where the package's folder is made.", show_default="here")
    ] = Path(),
) -> None:
    """Write a new package with a plugin for a role, its options, and tests that pass.

    ``extension`` is a plugin that wraps phases and observes, without a role.
    """
    folder = write_package(name, role, path)
    typer.echo(f"{folder}: a plugin for {role!r}; change into it and run `tox`, or `pip install -e .[test] && pytest`")


def write_package(name: str, role: str, parent: Path) -> Path:
    """Write a package called ``name`` under ``parent``.

    Returns:
        The folder.

    Raises:
        TrivetError: The name or role is none, the folder exists, or ``parent`` does not. Nothing is written then.
    """
    from trivet_schemas.errors import unknown_name

    if role not in _SUMMARIES:
        raise TrivetError(f"--role: {unknown_name('role', role, roles())}")
    package = package_name(name)
    if not parent.is_dir():
        raise TrivetError(f"--path: {parent} is not a folder; make it first, or name another")
    folder = parent / name
    if folder.exists() or folder.is_symlink():
        raise TrivetError(f"{folder} exists already; choose another name or --path")
    contents = render(name, package, role)
    for place, text in contents.items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def package_name(name: str) -> str:
    """The importable name of a distribution.

    Raises:
        TrivetError: If ``name`` is none that a package index accepts, gives no identifier, or is taken.
    """
    if not _NAME.fullmatch(name):
        raise TrivetError(
            f"NAME: {name!r} is no name for a distribution; use letters, digits, '-', '_' and '.', "
            "a letter or digit first and last"
        )
    package = re.sub(r"[-_.]+", "_", name).lower()
    if not package.isidentifier() or keyword.iskeyword(package):
        raise TrivetError(
            f"NAME: {name!r} would be imported as {package!r}, which Python does not allow; begin with a letter and "
            "use no keyword"
        )
    if package in sys.stdlib_module_names or package in {"trivet", "tests"}:
        raise TrivetError(f"NAME: {name!r} would be imported as {package!r}, which hides another module; rename it")
    if package.startswith("trivet_"):
        raise TrivetError(f"NAME: names that begin with trivet are Trivet's own; call it {package[7:]!r}, for example")
    taken = {point.name for point in entry_points(group="trivet")}
    if package in taken:
        raise TrivetError(f"NAME: a plugin called {package!r} is installed already; choose another name")
    return package


def render(name: str, package: str, role: str) -> dict[str, str]:
    """The files of a package: place in its folder → text."""
    from jinja2 import Environment, StrictUndefined

    from trivet._version import __version__
    from trivet.provider import API_VERSION
    from trivet.roles.base import CARDINALITY, Cardinality

    many = role == EXTENSION or CARDINALITY[role] in {Cardinality.MANY, Cardinality.PER_REQUEST}
    # Sources are not HTML: nothing is to be escaped.
    environment = Environment(  # noqa: S701
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    values: dict[str, Any] = {
        "distribution": name,
        "package": package,
        "plugin": package,
        "Class": "".join(part.capitalize() for part in package.split("_")),
        "role": role,
        "suite": _SUITES.get(role),
        "summary": _SUMMARIES[role],
        "many": many,
        "is_extension": role == EXTENSION,
        "worker_half": role in {"connector", "cache_tier"},
        "api": API_VERSION,
        "trivet_version": __version__,
        "yaml": f"  {role}: [{{use: {package}}}]" if many else f"  {role}: {{use: {package}}}",
        "options": _template(f"roles/{role}.options.jinja").rstrip("\n"),
    }

    def made(template: str) -> str:
        return environment.from_string(_template(template)).render(values)

    source = f"src/{package}"
    plugin = "roles/extension.plugin.jinja" if role == EXTENSION else "package/src/plugin.py.jinja"
    return {
        "pyproject.toml": made("package/pyproject.toml.jinja"),
        "tox.ini": made("package/tox.ini.jinja"),
        "README.md": made("package/README.md.jinja"),
        ".gitignore": made("package/gitignore.jinja"),
        f"{source}/__init__.py": made("package/src/init.py.jinja"),
        f"{source}/py.typed": "",
        f"{source}/plugin.py": made(plugin),
        f"{source}/options.py": made("package/src/options.py.jinja"),
        f"{source}/{role}.py": made(f"roles/{role}.py.jinja"),
        "tests/test_package.py": made("package/tests/test_package.py.jinja"),
        f"tests/test_{role}.py": made(f"roles/{role}.test.jinja"),
    }


def _template(name: str) -> str:
    return (files("trivet.launcher") / "templates" / name).read_text(encoding="utf-8")
