"""Everything that could be used: discovered and validated plugins, before any configuration is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivet.errors import PluginError
from trivet.provider import Component
from trivet.registry.discovery import describe_objects, discover_installed
from trivet.registry.imports import import_problems, load, load_options_model, missing_requirements, problems_of
from trivet.registry.offers import EXTENSION, collect_offers, collect_specs
from trivet.registry.records import Offer, Origin, Plugin
from trivet.registry.validation import check_hooks, core_specs, scan
from trivet.roles.base import CARDINALITY, Cardinality

if TYPE_CHECKING:
    from pydantic import BaseModel


class Catalog:
    """The plugins of this environment and of the embedder, with what each offers and what is wrong with it.

    Making one imports the entry points' modules and asks them for descriptors; it registers and activates nothing.
    """

    def __init__(self, objects: Sequence[object] = ()) -> None:
        self.plugins = [*discover_installed(), *describe_objects(objects)]
        self.specs = core_specs()
        self._spec_owners: dict[str, Plugin] = {}
        for plugin in self.plugins:
            scan(plugin)
        for plugin in self.plugins:
            collect_specs(plugin, self.specs, self._spec_owners)
        for plugin in self.plugins:
            check_hooks(plugin, self.specs)
            collect_offers(plugin)

    def check_active(self, active: Sequence[Plugin]) -> None:
        """Report hooks of active plugins that only inactive ones offer."""
        away = {name: owner.label for name, owner in self._spec_owners.items() if owner not in active}
        specs = {name: arguments for name, arguments in self.specs.items() if name not in away}
        for plugin in active:
            check_hooks(plugin, specs, away)

    def hooks_of(self, plugins: Sequence[Plugin]) -> list[str]:
        """Hooks that ``plugins`` offer to others."""
        return sorted(name for name, owner in self._spec_owners.items() if owner in plugins)

    def offers(self, role: str) -> list[Offer]:
        """Every provider of a role."""
        return [offer for plugin in self.plugins for offer in plugin.offers if offer.role == role]

    def components(self) -> Iterator[tuple[Plugin, Component]]:
        """Every component, with its plugin."""
        for plugin in self.plugins:
            for component in plugin.components:
                yield plugin, component

    def duplicate_components(self, plugins: Sequence[Plugin]) -> list[str]:
        """A problem for every ``(kind, name)`` that two of ``plugins`` offer."""
        owners: dict[tuple[str, str], list[Plugin]] = {}
        for plugin, part in self.components():
            if plugin in plugins:
                owners.setdefault((part.kind, part.name), []).append(plugin)
        return [ambiguous_component(*key, found) for key, found in owners.items() if len(found) > 1]

    def check(self) -> list[str]:
        """Every problem of every plugin, active or not, and what importing factories, option models and reducers shows.

        This is what ``trivet plugins check`` prints. Providers whose extra is not installed are passed over.
        """
        self.option_models()
        problems = [problem for plugin in self.plugins for problem in plugin.problems]
        problems += self.duplicate_components(self.plugins)
        for role in CARDINALITY:
            offers = self.offers(role)
            for name, count in Counter(offer.name for offer in offers).items():
                if count > 1:
                    labels = " and ".join(offer.plugin.label for offer in offers if offer.name == name)
                    problems.append(f"role {role!r}: the provider {name!r} is offered by {labels}; it cannot be named")
            for offer in offers:
                if offer.provider is not None and not missing_requirements(offer):
                    problems += import_problems(offer)
        for plugin, part in self.components():
            problems += problems_of(load, part.factory, f"{plugin.label}: factory of {part.kind} {part.name!r}")
        return list(dict.fromkeys(problems))

    def option_models(
        self, *, bundled_only: bool = False, extensions: bool = False
    ) -> dict[str, dict[str, type[BaseModel] | None]]:
        """Role → provider name → option model, for the schema of configurations and for flat arguments.

        ``bundled_only`` leaves out other distributions' providers, but not an embedder's. ``extensions`` adds the key
        ``extension`` with the plugins that wrap or observe, for the schema. A model that cannot be imported is reported
        as its plugin's problem and left out.
        """
        models: dict[str, dict[str, type[BaseModel] | None]] = {}
        wanted = [p for p in self.plugins if not (bundled_only and p.origin is Origin.INSTALLED)]
        for role in CARDINALITY:
            for offer in [offer for plugin in wanted for offer in plugin.offers if offer.role == role]:
                declared = offer.provider.options if offer.provider else None
                self._add_model(models, role, offer.name, offer.plugin, declared)
        for plugin in wanted if extensions else ():
            if plugin.extends and not plugin.problems:
                declared = getattr(plugin.target, "trivet_options", None)
                self._add_model(models, EXTENSION, plugin.name, plugin, declared)
        return models

    @staticmethod
    def _add_model(
        models: dict[str, dict[str, type[BaseModel] | None]], role: str, name: str, plugin: Plugin, declared: Any
    ) -> None:
        try:
            model = load_options_model(declared, plugin, f"{role} {name!r}")
        except PluginError as exc:
            plugin.problems += [problem for problem in exc.problems if problem not in plugin.problems]
        else:
            models.setdefault(role, {}).setdefault(name, model)


def ambiguous_component(kind: str, name: str, plugins: Sequence[Plugin]) -> str:
    """The message for a component that several plugins offer."""
    return f"{kind} {name!r} is offered by {' and by '.join(plugin.label for plugin in plugins)}; uninstall one of them"


def known_flat_names(
    objects: Sequence[object] = (), selections: Mapping[str, Any] | None = None
) -> dict[str, list[tuple[str, str]]]:
    """The flat arguments (``max_num_seqs``) that may be used: name → ``(role, option)`` pairs.

    They are declared by the option models of the bundled plugins, of ``objects``, and of the providers that
    ``selections`` names (the ``plugins`` section of a configuration, in any of its forms). Another installed plugin is
    not active, so its names are neither taken nor in the way. The name of an optional role chooses its provider:
    ``quantization="int8"``.
    """
    from trivet_schemas.options import collect_flat_names

    catalog = Catalog(objects)
    models = catalog.option_models(bundled_only=True)
    for role, known in catalog.option_models().items():
        for name in _named((selections or {}).get(role)) & known.keys():
            models.setdefault(role, {})[name] = known[name]
    roles = {role: [(role, "use")] for role, takes in CARDINALITY.items() if takes is Cardinality.OPTIONAL}
    return {**roles, **collect_flat_names(models)}


def _named(selection: Any) -> set[str]:
    found = set()
    for item in selection if isinstance(selection, list | tuple) else [selection]:
        name = item.get("use") if isinstance(item, Mapping) else getattr(item, "use", item)
        if isinstance(name, str):
            found.add(name)
    return found
