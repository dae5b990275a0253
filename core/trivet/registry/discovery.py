"""Find plugins: entry points of the group ``trivet`` and the objects of an embedder. Nothing is activated here."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, EntryPoint, entry_points
from types import ModuleType
from typing import Any

from trivet.provider import Component, Provider
from trivet.registry.records import Origin, Plugin, file_of
from trivet.registry.validation import has_hooks, unmarked_hooks
from trivet.roles.base import Role

GROUP = "trivet"
BUNDLED_DISTRIBUTION = "trivet"


def discover_installed() -> list[Plugin]:
    """A record per entry point, the bundled ones first, then by distribution and name.

    Every entry point's module is imported, because only it knows the names of its providers, and two providers with
    one name must be found. A module that cannot be imported is recorded with its exception and is no obstacle until it
    is used.
    """
    found = sorted(_entry_points(), key=lambda item: (item[0].name != BUNDLED_DISTRIBUTION, item[0].name, item[1].name))
    return [_load(distribution, entry_point) for distribution, entry_point in found]


def _entry_points() -> Iterator[tuple[Distribution, EntryPoint]]:
    # Of two copies of one distribution, the first on the path counts, as for imports.
    for entry_point in entry_points(group=GROUP):
        if entry_point.dist is not None:
            yield entry_point.dist, entry_point


def _load(distribution: Distribution, entry_point: EntryPoint) -> Plugin:
    origin = Origin.BUNDLED if distribution.name == BUNDLED_DISTRIBUTION else Origin.INSTALLED
    plugin = Plugin(
        name=entry_point.name,
        origin=origin,
        distribution=distribution.name,
        version=distribution.version,
        entry_point=entry_point.value,
    )
    try:
        target = entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # noqa: BLE001 - a module may fail in any way, SystemExit included; recorded, not lost
        plugin.failure = f"{type(exc).__name__}: {exc}"
        plugin.problems.append(
            f"entry point {entry_point.name!r} = {entry_point.value!r} of {distribution.name} {distribution.version} "
            f"failed to import: {plugin.failure}"
        )
        return plugin
    plugin.file = file_of(target)
    if inspect.isclass(target):
        plugin.report(
            f"entry point {entry_point.name!r} names the class {target.__qualname__}; have you forgotten the ()? "
            f"Name the module ({target.__module__}) and let its trivet_extend build objects for each engine"
        )
    elif not isinstance(target, ModuleType):
        plugin.report(
            f"entry point {entry_point.name!r} names an object of class {type(target).__qualname__}, which all "
            f"engines of the process would share; name a module and let its trivet_extend build objects for each engine"
        )
    else:
        plugin.target = target
    return plugin


def describe_objects(plugins: Sequence[object], origin: Origin = Origin.OBJECT, *, prefix: str = "") -> list[Plugin]:
    """A record per object: a module or instance with hook implementations, a role's object, a descriptor."""
    names: Counter[str] = Counter()
    records: list[Plugin] = []
    for position, target in enumerate(plugins):
        name = prefix + _name_of(target)
        names[name] += 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        records.append(_describe(name, target, origin))
        if any(target is earlier for earlier in plugins[:position]):
            records[-1].report("the same object is given twice")
    return records


def _name_of(target: Any) -> str:
    if isinstance(target, Provider | Component):
        return target.name
    if isinstance(target, ModuleType):
        return target.__name__
    given = inspect.getattr_static(target, "trivet_name", None)
    if isinstance(given, str) and given:
        return given
    return target.__name__ if inspect.isclass(target) else type(target).__name__


def _describe(name: str, target: Any, origin: Origin) -> Plugin:
    plugin = Plugin(name=name, origin=origin, file=file_of(target))
    if isinstance(target, Provider | Component):
        plugin.file = None
        plugin.target = target
    elif inspect.isclass(target):
        plugin.report(f"{target.__qualname__} is a class, not an object; have you forgotten the ()?")
    elif has_hooks(target) or isinstance(target, Role):
        plugin.target = target
    elif unmarked := unmarked_hooks(target):
        plugin.report(f"{', '.join(unmarked)} must be marked with @trivet.hookspecs.hookimpl")
    else:
        plugin.report(
            f"{target!r} has no hook implementation (a function marked with @trivet.hookspecs.hookimpl) and is no "
            f"object of a role (a class derived from one in trivet.roles)"
        )
    return plugin
