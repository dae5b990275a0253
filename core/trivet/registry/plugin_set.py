"""A set of plugins as plain data, so that a worker process rebuilds exactly the same one."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

from trivet.errors import PluginError
from trivet.provider import API_VERSION, Component, Provider
from trivet.registry.imports import is_import_path, load
from trivet.registry.records import Origin, Plugin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trivet.registry.catalog import Catalog


class InstalledEntry(TypedDict):
    """An active entry point; the worker must find the very same version."""

    name: str
    entry_point: str
    distribution: str
    version: str


class ObjectEntry(TypedDict):
    """An embedder's object.

    ``kind``: ``module`` (``path`` is its name), ``object`` (``path`` is ``package.module:Class``, called with
    ``options`` as keywords), ``provider`` or ``component`` (``options`` are the descriptor's fields).
    """

    name: str
    kind: str
    path: str
    options: dict[str, Any]


class PluginSet(TypedDict):
    """JSON-able. ``config`` names the selected provider for every role, so that nothing is chosen again;
    ``selection`` holds ``[plugin, provider]`` pairs per role."""

    api: list[int]
    config: dict[str, Any]
    installed: list[InstalledEntry]
    objects: list[ObjectEntry]
    selection: dict[str, list[list[str]]]


def describe_installed(active: Sequence[Plugin]) -> list[InstalledEntry]:
    """The entry points among the active plugins."""
    return [
        {
            "name": p.name,
            "entry_point": p.entry_point or "",
            "distribution": p.distribution or "",
            "version": p.version or "",
        }
        for p in active
        if p.origin in {Origin.BUNDLED, Origin.INSTALLED}
    ]


def describe_object(plugin: Plugin) -> ObjectEntry:
    """How a worker can rebuild an embedder's object. Raises :class:`PluginError` saying what is missing for that."""
    target = plugin.target
    if isinstance(target, ModuleType):
        if sys.modules.get(target.__name__) is not target:
            raise PluginError(f"{plugin.label}: module {target.__name__!r} cannot be imported by that name elsewhere")
        return {"name": plugin.name, "kind": "module", "path": target.__name__, "options": {}}
    if isinstance(target, Provider | Component):
        values = {field.name: getattr(target, field.name) for field in fields(target)}
        if isinstance(target, Provider):
            values["suits"] = None  # the choice has been made
            values["options"] = _importable(plugin, values["options"])
            values |= {name: dict(values[name]) for name in ("capabilities", "requires", "reducers")}
        values["api"] = list(values["api"])
        return {"name": plugin.name, "kind": type(target).__name__.lower(), "path": "", "options": values}
    named = getattr(target, "trivet_import", None)
    if named is None:
        raise PluginError(
            f"{plugin.label} lives in this process only. For workers in other processes, give it an attribute "
            f"trivet_import = (\"package.module:Class\", {{options}}) to build it from, or use the executor 'inline'"
        )
    if not (isinstance(named, tuple) and len(named) == 2 and is_import_path(named[0]) and isinstance(named[1], dict)):
        raise PluginError(f"{plugin.label}: trivet_import must be ('package.module:Class', {{options}}), got {named!r}")
    load(named[0], f"{plugin.label}: trivet_import")
    return {"name": plugin.name, "kind": "object", "path": named[0], "options": dict(named[1])}


def _importable(plugin: Plugin, model: Any) -> str | None:
    if model is None or isinstance(model, str):
        return model
    path = f"{model.__module__}:{model.__qualname__}"
    try:
        found = load(path, "options") if inspect.isclass(model) else None
    except PluginError:
        found = None
    if found is not model:
        raise PluginError(
            f"{plugin.label}: the option model {model!r} cannot be imported in a worker process; define it in a module"
        )
    return path


def rebuild_object(entry: ObjectEntry) -> Any:
    """The object that :func:`describe_object` described."""
    kind, path, options = entry["kind"], entry["path"], dict(entry["options"])
    if kind == "module":
        try:
            return importlib.import_module(path)
        except Exception as exc:
            raise PluginError(
                f"plugin {entry['name']!r}: module {path!r} failed to import: {type(exc).__name__}: {exc}"
            ) from exc
    if kind in {"provider", "component"}:
        options["api"] = tuple(options["api"])
        return Provider(**options) if kind == "provider" else Component(**options)
    return load(path, f"plugin {entry['name']!r}: trivet_import")(**options)


def installed_problems(entries: Sequence[InstalledEntry], catalog: Catalog) -> list[str]:
    """What differs between this process's entry points and the ones that a set was made with."""
    problems = []
    for entry in entries:
        found = next(
            (p for p in catalog.plugins if (p.distribution, p.name) == (entry["distribution"], entry["name"])), None
        )
        title = f"plugin {entry['name']!r} of {entry['distribution']} {entry['version']}"
        if found is None:
            problems.append(f"{title} is active in the engine but not installed in this worker")
        elif found.version != entry["version"]:
            problems.append(f"{title} is active in the engine, but this worker has version {found.version}")
    return problems


def api_problems(api: Sequence[int]) -> list[str]:
    """Why a set of another Trivet cannot be used."""
    if tuple(api) == API_VERSION:
        return []
    ours = ".".join(map(str, API_VERSION))
    return [
        f"the engine has plugin API {'.'.join(map(str, api))}, this worker has {ours}; install the same Trivet on both"
    ]
