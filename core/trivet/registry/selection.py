"""Choose the providers of each role, as the configuration, the embedder's objects and ``suits`` say."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivet.errors import PluginError
from trivet.provider import Suitability
from trivet.registry.imports import load_options_model, missing_requirements
from trivet.registry.offers import AUTO, EXTENSION
from trivet.registry.records import Offer, Origin, Plugin, listed
from trivet.roles.base import CARDINALITY, Cardinality
from trivet_schemas.errors import ConfigError, suggestion, unknown_name
from trivet_schemas.validation import validate_options

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trivet.context import Context
    from trivet.registry.catalog import Catalog
    from trivet_schemas.config import EngineConfig

#: the packages of this project that offer each role; where they need an extra, it is named
BUNDLED_PACKAGES: dict[str, tuple[str, ...]] = {
    "scheduler": ("trivet_continuous", "trivet_static"),
    "cache": ("trivet_paged", "trivet_contiguous"),
    "cache_tier": ("trivet_offload",),
    "executor": ("trivet_inline",),
    "runner": ("trivet_torch",),
    "model": ("trivet_native", "trivet_transformers"),
    "attention": ("trivet_triton_attention", "trivet_cpu_attention", "trivet_torch_attention"),
    "quantization": ("trivet_quantization",),
    "sampler": ("trivet_sampler",),
    "tokenizer": ("trivet_hf_tokenizer",),
}

Pins = Mapping[str, Sequence[Sequence[str]]]
"""Role → ``[plugin, provider]`` pairs that were chosen elsewhere; decides where a name alone is ambiguous."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A provider that ``use: auto`` considered; ``rank`` None: it cannot serve."""

    offer: Offer
    rank: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A selected provider. ``options`` are what the configuration gives, ``model`` the validated option model."""

    offer: Offer
    why: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)
    model: BaseModel | None = None


@dataclass(slots=True)
class RoleSelection:
    """What was selected for a role. ``problem``: why nothing could be, where that is no error yet."""

    role: str
    choices: list[Choice] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ExtensionChoice:
    """A plugin that the configuration names under ``plugins.extension``."""

    plugin: Plugin
    path: str
    options: dict[str, Any]
    model: BaseModel | None


class Selector:
    """Selects for every role and gathers all problems. Attributes hold the outcome."""

    def __init__(
        self,
        catalog: Catalog,
        config: EngineConfig,
        context: Context,
        required: Collection[str],
        pins: Pins | None = None,
    ) -> None:
        self._catalog, self._config, self._context = catalog, config, context
        self.required = frozenset(required)
        self._pins = pins or {}
        self.problems: list[str] = []
        self.roles: dict[str, RoleSelection] = {}
        self.extensions: list[ExtensionChoice] = []
        for role in config.plugins:
            if role not in CARDINALITY and role != EXTENSION:
                self._fail(f"plugins.{role}", unknown_name("role", role, [*CARDINALITY, EXTENSION]))
        for role, cardinality in CARDINALITY.items():
            selection = self.roles[role] = RoleSelection(role)
            if cardinality in {Cardinality.ONE, Cardinality.OPTIONAL}:
                self._select_one(selection, cardinality)
            else:
                self._select_many(selection, cardinality)
            self.problems += [problem for choice in selection.choices for problem in self._missing(choice)]
        self._select_extensions()
        self.active = self._active_plugins()
        for plugin in catalog.plugins:
            if plugin in self.active or plugin.origin is Origin.OBJECT:
                self.problems += plugin.problems
        self.problems = list(dict.fromkeys(self.problems))

    def _fail(self, path: str, message: str) -> None:
        from trivet_schemas.errors import Problem

        self.problems += [str(problem) for problem in self._config.error(Problem(path, message)).problems]

    def _paths(self, role: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """``(path, use, options)`` of what the configuration says about a role."""
        is_list = isinstance(self._config.plugins.get(role), list)
        for index, selection in enumerate(self._config.selections(role)):
            yield (f"plugins.{role}.{index}" if is_list else f"plugins.{role}"), selection.use, dict(selection.options)

    def _select_one(self, selection: RoleSelection, cardinality: Cardinality) -> None:
        role = selection.role
        given = list(self._paths(role))
        if len(given) > 1 or (not given and role in self._config.plugins):
            names = ", ".join(repr(use) for _, use, _ in given) or "an empty list"
            self._fail(f"plugins.{role}", f"role {role!r} takes one provider, got {names}; name one of them")
            return
        path, use, options = given[0] if given else (f"plugins.{role}", AUTO, {})
        # An object of the role is there to be used; a descriptor is an offer, which the configuration may pass over.
        offers = [offer for offer in self._catalog.offers(role) if offer.is_object]
        objects = [offer for offer in offers if offer.instance is not None or use == AUTO]
        if len(objects) > 1:
            labels = " and ".join(offer.plugin.label for offer in objects)
            self.problems.append(f"role {role!r} takes one provider, but {labels} were both passed; pass one of them")
        elif objects and use not in {AUTO, objects[0].name}:
            self._fail(
                path,
                f"role {role!r} takes one provider, got {use!r} and the object {objects[0].plugin.label}; drop one",
            )
        elif objects:
            self._choose(selection, objects[0], "passed as an object", path, options)
        elif use != AUTO:
            self._choose_named(selection, use, path, options)
        elif given or cardinality is Cardinality.ONE:
            self._choose_auto(selection, path, options, explicit=bool(given))

    def _select_many(self, selection: RoleSelection, cardinality: Cardinality) -> None:
        seen: dict[str, str] = {}
        for path, use, options in self._paths(selection.role):
            if use in seen and cardinality is Cardinality.PER_REQUEST:
                self._fail(path, f"{use!r} is named already at {seen[use]}; a request could not tell them apart")
                continue
            seen[use] = path
            if use == AUTO:
                self._choose_auto(selection, path, options, explicit=True)
            else:
                self._choose_named(selection, use, path, options)
        taken = [choice.offer for choice in selection.choices]
        for offer in self._catalog.offers(selection.role):
            if offer.is_object and offer not in taken:
                self._choose(selection, offer, "passed as an object", f"plugins.{selection.role}", {})

    def _choose_named(self, selection: RoleSelection, use: str, path: str, options: dict[str, Any]) -> None:
        role = selection.role
        matches = [offer for offer in self._catalog.offers(role) if offer.name == use]
        pinned = {plugin for plugin, provider in self._pins.get(role, ()) if provider == use}
        if len(matches) > 1 and pinned:
            matches = [offer for offer in matches if offer.plugin.name in pinned]
        if len(matches) > 1:
            labels = " and ".join(offer.plugin.label for offer in matches)
            self._fail(
                path, f"{use!r} is ambiguous for role {role!r}: offered by {labels}; uninstall one of them or rename it"
            )
        elif matches:
            self._choose(selection, matches[0], "named by the configuration", path, options)
        else:
            self._fail_unknown(role, use, path)

    def _fail_unknown(self, role: str, use: str, path: str) -> None:
        plugins = self._catalog.plugins
        faulty = [plugin for plugin in plugins if (role, use) in plugin.rejected]
        faulty += [plugin for plugin in plugins if plugin.name == use and plugin.problems and plugin not in faulty]
        if faulty:
            for plugin in faulty:
                for problem in plugin.problems:
                    self._fail(path, f"{use!r} cannot be used: {problem}")
            return
        names = sorted({offer.name for offer in self._catalog.offers(role)})
        near = suggestion(use, names)
        text = f"unknown plugin {use!r} for role {role!r}"
        text += f"; did you mean {near!r}?" if near else ";"
        text += f" available: {listed(names)}"
        others = sorted({offer.role for plugin in plugins for offer in plugin.offers if offer.name == use})
        if others:
            text += f"; {use!r} is a provider of role {listed(others)}"
        elif any(plugin.name == use and plugin.target is not None for plugin in plugins):
            text += (
                f"; plugin {use!r} offers none for this role (what wraps or observes goes under plugins.{EXTENSION})"
            )
        silent = [plugin for plugin in plugins if plugin.problems and not plugin.offers]
        notes = [plugin.problems[0] for plugin in silent if plugin.origin is not Origin.OBJECT]
        text += "".join(f"; note: {note}" for note in notes)
        self._fail(path, text)

    def _choose_auto(self, selection: RoleSelection, path: str, options: dict[str, Any], *, explicit: bool) -> None:
        role = selection.role
        bundled = [offer for offer in self._catalog.offers(role) if offer.plugin.origin is Origin.BUNDLED]
        selection.candidates = [self._candidate(offer, alone=len(bundled) == 1) for offer in bundled]
        able = [candidate for candidate in selection.candidates if candidate.rank is not None]
        best = max((candidate.rank for candidate in able if candidate.rank is not None), default=0)
        winners = [candidate for candidate in able if candidate.rank == best]
        if not winners:
            selection.problem = self._nobody(selection) if bundled else self.without_provider(role)
            if explicit or role in self.required:
                self._fail(path, selection.problem)
        elif len(winners) > 1:
            names = " and ".join(f"{winner.offer.label} ({winner.reason})" for winner in winners)
            self._fail(
                path, f"auto cannot decide for role {role!r}: {names} have the same rank {best}; name one with 'use'"
            )
        else:
            self._choose(selection, winners[0].offer, f"auto: {winners[0].reason}", path, options)

    def _candidate(self, offer: Offer, *, alone: bool) -> Candidate:
        if missing := missing_requirements(offer):
            return Candidate(offer, None, "; ".join(missing))
        suits = offer.provider.suits if offer.provider else None
        if suits is None:
            return (
                Candidate(offer, 0, "the only bundled provider")
                if alone
                else Candidate(offer, None, "chosen only by name")
            )
        try:
            answer: Any = suits(self._context)
        except Exception as exc:  # noqa: BLE001 - reported as the plugin's problem, with its name
            self.problems.append(f"{offer.label}: suits raised {type(exc).__name__}: {exc}")
            return Candidate(offer, None, f"suits raised {type(exc).__name__}")
        if not isinstance(answer, Suitability):
            self.problems.append(f"{offer.label}: suits must return trivet.provider.Suitability, got {answer!r}")
            return Candidate(offer, None, "suits did not answer")
        return Candidate(offer, answer.rank, answer.reason)

    def _nobody(self, selection: RoleSelection) -> str:
        reasons = "; ".join(f"{candidate.offer.name}: {candidate.reason}" for candidate in selection.candidates)
        return f"no bundled provider can serve role {selection.role!r} here ({reasons})"

    def without_provider(self, role: str) -> str:
        """The message for a role that nothing offers: which packages would, and what is installed but not named."""
        text = f"role {role!r} has no provider"
        if packages := BUNDLED_PACKAGES.get(role):
            text += f"; offered by the bundled {'package' if len(packages) == 1 else 'packages'} {', '.join(packages)}"
        installed = [offer for offer in self._catalog.offers(role) if offer.plugin.origin is Origin.INSTALLED]
        for offer in installed:
            text += f"; {offer.label} is installed: set plugins.{role}.use to {offer.name!r}"
        wanted = set(BUNDLED_PACKAGES.get(role, ()))
        failed = [plugin for plugin in self._catalog.plugins if plugin.failure is not None]
        failed = [
            p for p in failed if p.origin is Origin.INSTALLED or (p.entry_point or "").partition(".")[0] in wanted
        ]
        return text + "".join(f"; note: {plugin.problems[0]}" for plugin in failed)

    def _choose(self, selection: RoleSelection, offer: Offer, why: str, path: str, options: dict[str, Any]) -> None:
        model = None
        if offer.provider is None:
            for key in options:
                self._fail(f"{path}.{key}", f"{offer.plugin.label} is an object, which takes no options")
        else:
            model = self._options(offer.provider.options, offer.plugin, f"provider {offer.name!r}", path, options)
        selection.choices.append(Choice(offer, why, path, options, model))

    def _options(
        self, declared: Any, plugin: Plugin, where: str, path: str, options: dict[str, Any]
    ) -> BaseModel | None:
        try:
            model = load_options_model(declared, plugin, where)
        except PluginError as exc:
            self.problems += exc.problems
            return None
        if model is None:
            for key in options:
                self._fail(f"{path}.{key}", f"{where} takes no options")
            return None
        try:
            return validate_options(model, options, path)
        except ConfigError as exc:
            self.problems += [str(problem) for problem in self._config.error(exc.problems).problems]
            return None

    @staticmethod
    def _missing(choice: Choice) -> list[str]:
        return [f"{choice.offer.label} {problem}" for problem in missing_requirements(choice.offer)]

    def _select_extensions(self) -> None:
        seen: dict[str, str] = {}
        for path, use, options in self._paths(EXTENSION):
            matches = [plugin for plugin in self._catalog.plugins if plugin.name == use]
            if use in seen:
                self._fail(path, f"{use!r} is named already at {seen[use]}")
            elif len(matches) > 1:
                labels = " and ".join(plugin.label for plugin in matches)
                self._fail(path, f"{use!r} is ambiguous: {labels}; uninstall one of them or rename it")
            elif not matches:
                names = sorted(plugin.name for plugin in self._catalog.plugins if plugin.origin is not Origin.BUNDLED)
                near = suggestion(use, names)
                hint = f"; did you mean {near!r}?" if near else ";"
                self._fail(path, f"unknown plugin {use!r}{hint} installed entry points: {listed(names)}")
            else:
                self._extend(matches[0], path, options)
            seen.setdefault(use, path)

    def _extend(self, plugin: Plugin, path: str, options: dict[str, Any]) -> None:
        if plugin.problems:
            for problem in plugin.problems:
                self._fail(path, f"{plugin.name!r} cannot be used: {problem}")
            return
        if not plugin.extends:
            roles = sorted({offer.role for offer in plugin.offers})
            self._fail(path, f"{plugin.label} wraps and observes nothing; name its providers under {listed(roles)}")
            return
        declared = getattr(plugin.target, "trivet_options", None)
        where = f"extension {plugin.name!r} (its trivet_options)"
        model = self._options(declared, plugin, where, path, options)
        self.extensions.append(ExtensionChoice(plugin, path, options, model))

    def choose(self, role: str, name: str, options: Mapping[str, Any]) -> Choice:
        """A provider by name with options of the caller's. Raises :class:`PluginError`."""
        before, self.problems = self.problems, []
        selection = RoleSelection(role)
        try:
            self._choose_named(selection, name, f"build({role!r}, {name!r})", dict(options))
            problems = self.problems + [problem for choice in selection.choices for problem in self._missing(choice)]
        finally:
            self.problems = before
        if problems:
            raise PluginError(problems)
        return selection.choices[0]

    def resolved_config(self) -> dict[str, Any]:
        """The configuration as plain data, with the chosen provider's name for every role."""
        data = self._config.model_dump(mode="json")
        for role, selection in self.roles.items():
            chosen = [{"use": choice.offer.name, **choice.options} for choice in selection.choices]
            if chosen:
                is_single = CARDINALITY[role] in {Cardinality.ONE, Cardinality.OPTIONAL}
                data["plugins"][role] = chosen[0] if is_single else chosen
        return data

    def _active_plugins(self) -> list[Plugin]:
        """In the order of registration: plugins of selected providers by role, extensions, the embedder's objects."""
        plugins = [choice.offer.plugin for selection in self.roles.values() for choice in selection.choices]
        plugins = [plugin for plugin in plugins if plugin.origin is not Origin.OBJECT]
        plugins += [extension.plugin for extension in self.extensions if extension.plugin.origin is not Origin.OBJECT]
        plugins += [plugin for plugin in self._catalog.plugins if plugin.origin is Origin.OBJECT]
        return list(dict.fromkeys(plugins))
