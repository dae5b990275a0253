"""Everything that could be used: discovered and validated plugins, before any configuration is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivet.errors import PluginError
from trivet.provider import Component
from trivet.registry.discovery import describe_objects, discover_installed
from trivet.registry.imports import load_options_model
from trivet.registry.offers import collect_offers, collect_specs
from trivet.registry.records import Offer, Origin, Plugin
from trivet.registry.validation import check_hooks, core_specs, scan
from trivet.roles.base import CARDINALITY

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

    def option_models(self, *, bundled_only: bool = False) -> dict[str, dict[str, type[BaseModel] | None]]:
        """Role → provider name → option model, for the schema of configurations and for flat arguments.

        ``bundled_only`` leaves out other distributions' providers, but not an embedder's. A model that cannot be
        imported is reported as its plugin's problem and left out.
        """
        models: dict[str, dict[str, type[BaseModel] | None]] = {}
        for role in CARDINALITY:
            for offer in self.offers(role):
                if bundled_only and offer.plugin.origin is Origin.INSTALLED:
                    continue
                try:
                    declared = offer.provider.options if offer.provider else None
                    model = load_options_model(declared, offer.plugin, f"provider {offer.name!r}")
                except PluginError as exc:
                    offer.plugin.problems += [p for p in exc.problems if p not in offer.plugin.problems]
                    continue
                models.setdefault(role, {}).setdefault(offer.name, model)
        return models


def ambiguous_component(kind: str, name: str, plugins: Sequence[Plugin]) -> str:
    """The message for a component that several plugins offer."""
    return f"{kind} {name!r} is offered by {' and by '.join(plugin.label for plugin in plugins)}; uninstall one of them"


def known_flat_names(
    objects: Sequence[object] = (), selections: Mapping[str, Any] | None = None
) -> dict[str, list[tuple[str, str]]]:
    """The flat arguments (``max_num_seqs``) that may be used: name → ``(role, option)`` pairs.

    They are declared by the option models of the bundled plugins, of ``objects``, and of the providers that
    ``selections`` names (the ``plugins`` section of a configuration, in any of its forms). Another installed plugin is
    not active, so its names are neither taken nor in the way.
    """
    from trivet_schemas.options import collect_flat_names

    catalog = Catalog(objects)
    models = catalog.option_models(bundled_only=True)
    for role, known in catalog.option_models().items():
        for name in _named((selections or {}).get(role)) & known.keys():
            models.setdefault(role, {})[name] = known[name]
    return collect_flat_names(models)


def _named(selection: Any) -> set[str]:
    found = set()
    for item in selection if isinstance(selection, list | tuple) else [selection]:
        name = item.get("use") if isinstance(item, Mapping) else getattr(item, "use", item)
        if isinstance(name, str):
            found.add(name)
    return found
