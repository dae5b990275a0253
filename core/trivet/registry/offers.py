"""Ask plugins what they offer, and check the descriptors that they return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trivet.provider import Component, Provider
from trivet.registry.imports import is_import_path
from trivet.registry.records import Offer, Origin, Plugin
from trivet.registry.validation import api_problem, read_specs
from trivet.roles import ROLE_CLASSES
from trivet.roles.base import CARDINALITY, Role
from trivet_schemas.errors import unknown_name

AUTO = "auto"
#: key under ``plugins`` for plugins that only wrap and observe: a list of entry point names with options
EXTENSION = "extension"


def collect_specs(plugin: Plugin, specs: dict[str, tuple[str, ...]], owners: dict[str, Plugin]) -> None:
    """Call ``trivet_add_hookspecs`` of one plugin and add what it offers to ``specs``."""
    for namespace in _call(plugin, "trivet_add_hookspecs"):
        found = dict(read_specs(namespace))
        if not found:
            plugin.report(f"trivet_add_hookspecs returned {namespace!r}, which has no function marked with hookspec")
        for name, arguments in found.items():
            if name in specs:
                owner = owners[name].label if name in owners else "Trivet itself"
                plugin.report(f"offers the hook {name!r}, which {owner} has already")
            else:
                specs[name], owners[name] = arguments, plugin
        plugin.specs.append(namespace)


def collect_offers(plugin: Plugin) -> None:
    """Fill ``plugin.offers`` and ``plugin.components``; each bad descriptor is reported and left out."""
    target = plugin.target
    providers: list[Any] = [target] if isinstance(target, Provider) else list(_call(plugin, "trivet_providers"))
    components: list[Any] = [target] if isinstance(target, Component) else list(_call(plugin, "trivet_components"))
    seen: set[tuple[str, str]] = set()
    for provider in providers:
        if not isinstance(provider, Provider):
            plugin.report(f"trivet_providers returned {provider!r}; it must return a list of trivet.provider.Provider")
            continue
        problems = list(_provider_problems(provider))
        if (provider.role, provider.name) in seen:
            problems.append(f"offers the provider {provider.name!r} for role {provider.role!r} twice")
        seen.add((provider.role, provider.name))
        for problem in problems:
            plugin.report(problem)
        if problems:
            plugin.rejected.add((provider.role, provider.name))
        else:
            plugin.offers.append(Offer(provider.role, provider.name, plugin, provider=provider))
    if isinstance(target, Role):
        if role_problem := _role_problem(target):
            plugin.report(role_problem)
        else:
            plugin.offers.append(Offer(target.role, plugin.name, plugin, instance=target))
    for component in components:
        if not isinstance(component, Component):
            plugin.report(
                f"trivet_components returned {component!r}; it must return a list of trivet.provider.Component"
            )
        elif misfit := _component_problem(component):
            plugin.report(misfit)
        elif any((known.kind, known.name) == (component.kind, component.name) for known in plugin.components):
            plugin.report(f"offers the {component.kind} {component.name!r} twice")
        else:
            plugin.components.append(component)
    is_descriptor = isinstance(target, Provider | Component | Role)
    if (
        target is not None
        and plugin.origin is not Origin.OBJECT
        and not plugin.hooks
        and not is_descriptor
        and not plugin.problems
    ):
        plugin.report("has no hook implementation (a function marked with @trivet.hookspecs.hookimpl)")


def _call(plugin: Plugin, hook: str) -> Sequence[Any]:
    impl = plugin.implements(hook)
    if impl is None or impl.wrapper or impl.arguments:  # what is wrong with it has been reported
        return ()
    try:
        returned = impl.function()
    except Exception as exc:  # noqa: BLE001 - whatever a plugin raises becomes its problem, with its name
        plugin.report(f"{hook} at {impl.place} raised {type(exc).__name__}: {exc}")
        return ()
    if returned is None or isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
        plugin.report(f"{hook} at {impl.place} must return a list, got {returned!r}")
        return ()
    return list(returned)


def _provider_problems(provider: Provider) -> Iterator[str]:
    where = f"provider {provider.name!r} of role {provider.role!r}"
    if provider.role not in CARDINALITY:
        yield f"provider {provider.name!r}: {unknown_name('role', provider.role, CARDINALITY)}"
    if not isinstance(provider.name, str) or not provider.name or provider.name == AUTO:
        yield f"{where}: the name must be a word other than 'auto'"
    if problem := api_problem(provider.api):
        yield f"{where}: {problem}"
    for field in ("factory", "worker_factory"):
        path = getattr(provider, field)
        if (field == "factory" or path is not None) and not is_import_path(path):
            yield f"{where}: {field} must be 'package.module:Class', got {path!r}"
    if isinstance(provider.options, str) and not is_import_path(provider.options):
        yield f"{where}: options must be a model class or 'package.module:Model', got {provider.options!r}"
    suits: Any = provider.suits
    if suits is not None and not callable(suits):
        yield f"{where}: suits must be a function of the context, got {suits!r}"
    for name, path in provider.reducers.items():
        if not is_import_path(path):
            yield f"{where}: reducer {name!r} must be 'package.module:function', got {path!r}"


def _role_problem(target: Role) -> str | None:
    role = getattr(type(target), "role", None)
    if role is None or role not in ROLE_CLASSES:
        return f"class {type(target).__qualname__}: {unknown_name('role', role, ROLE_CLASSES)}"
    expected = ROLE_CLASSES[role]
    if not isinstance(target, expected):
        return (
            f"{type(target).__qualname__} says role {role!r} but is not derived from trivet.roles.{expected.__name__}"
        )
    return None


def _component_problem(component: Component) -> str | None:
    where = f"component {component.name!r} of kind {component.kind!r}"
    if problem := api_problem(component.api):
        return f"{where}: {problem}"
    if not is_import_path(component.factory):
        return f"{where}: factory must be 'package.module:name', got {component.factory!r}"
    return None
