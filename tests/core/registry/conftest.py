"""A world of fake distributions on ``sys.path``, found by the real ``importlib.metadata``."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trivet.errors import PluginError
from trivet.registry import Registry
from trivet.roles import ROLE_CLASSES, Side
from trivet_schemas.config import EngineConfig

# One concrete class per role; `fakes:Scheduler` and so on are the factories of fake providers.
_FAKES = """
from trivet.roles import ROLE_CLASSES
from trivet_schemas.options import Options


def concrete(role, **extra):
    base = ROLE_CLASSES[role]

    def init(self, context=None, options=None):
        self.context, self.options = context, options

    body = {name: lambda self, *args, **kwargs: None for name in base.__abstractmethods__}
    return type(base.__name__, (base,), {**body, "__init__": init, "__module__": __name__, **extra})


for _role, _base in ROLE_CLASSES.items():
    globals()[_base.__name__] = concrete(_role)


class SizeOptions(Options):
    size: int = 4
    policy: str = "fcfs"
"""

_HEADER = """
from trivet.hookspecs import hookimpl, hookspec
from trivet.provider import Component, Provider, Suitability
"""


class World:
    """Makes distributions, modules and registries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: set[str] = set()
        self.module("fakes", _FAKES)

    def module(self, name: str, source: str) -> Path:
        path = self.folder / f"{name}.py"
        path.write_text(_HEADER + textwrap.dedent(source), encoding="utf-8")
        self.made.add(name)
        importlib.invalidate_caches()
        return path

    def distribution(self, name: str, version: str, entry_points: Mapping[str, str]) -> None:
        """A distribution with ``entry_points``: name → module (with an optional ``:attribute``)."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[trivet]\n{lines}", encoding="utf-8")
        importlib.invalidate_caches()

    def plugin(self, name: str, source: str, *, distribution: str | None = None, version: str = "1.0") -> Path:
        """A distribution of one entry point ``name``, whose module ``name_plugin`` has ``source``."""
        path = self.module(f"{name}_plugin", source)
        self.distribution(distribution or f"acme-{name}", version, {name: f"{name}_plugin"})
        return path

    def offering(self, name: str, *offers: str, distribution: str | None = None, extra: str = "") -> Path:
        """A plugin whose ``trivet_providers`` returns the given ``Provider(...)`` expressions."""
        source = "@hookimpl\ndef trivet_providers():\n    return [" + ", ".join(offers) + "]\n" + textwrap.dedent(extra)
        return self.plugin(name, source, distribution=distribution)

    def bundle(self, **plugins: str) -> None:
        """Replace the bundled plugins: entry point → source of its module."""
        for name, source in plugins.items():
            self.module(f"bundled_{name}", source)
        self.distribution("trivet", "7.7", {name: f"bundled_{name}" for name in plugins})

    def config(self, plugins: Mapping[str, Any] | None = None) -> EngineConfig:
        return EngineConfig(model="demo", plugins=dict(plugins or {}))

    def registry(
        self, plugins: Mapping[str, Any] | None = None, *objects: object, required: Sequence[str] | None = (), **kw: Any
    ) -> Registry:
        return Registry(self.config(plugins), objects, required=required, **kw)

    def problems(
        self, plugins: Mapping[str, Any] | None = None, *objects: object, required: Sequence[str] | None = ()
    ) -> list[str]:
        """The problems that stop a registry from being made."""
        with pytest.raises(PluginError) as caught:
            self.registry(plugins, *objects, required=required)
        return caught.value.problems

    def problem(self, plugins: Mapping[str, Any] | None = None, *objects: object) -> str:
        """The one problem that stops a registry from being made."""
        (problem,) = self.problems(plugins, *objects)
        return problem

    def object(self, role: str, **attributes: Any) -> Any:
        """An object of a role whose methods do nothing, as an embedder would pass it."""
        return concrete(role, **attributes)()

    def worker_registry(self, data: Any) -> Registry:
        return Registry.from_plugin_set(data, side=Side.WORKER)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Return a world without bundled plugins: an empty distribution ``trivet`` comes first on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    world = World(folder)
    world.bundle()
    yield world
    for name in world.made:
        sys.modules.pop(name, None)


def concrete(role: str, **extra: Any) -> type[Any]:
    """A class of a role whose methods do nothing."""
    base = ROLE_CLASSES[role]
    body: dict[str, Any] = {name: lambda self, *args, **kwargs: None for name in base.__abstractmethods__}
    return type(f"My{base.__name__}", (base,), {**body, **extra})


@pytest.fixture
def my_scheduler() -> Any:
    """Return a scheduler that an embedder made."""
    return concrete("scheduler")()
