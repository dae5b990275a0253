"""The registry itself: discovered, validated, selected, frozen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivet import hookspecs
from trivet.errors import PluginError
from trivet.hooks import EngineHooks, HookStats, WorkerHooks
from trivet.provider import API_VERSION, Component
from trivet.registry.catalog import Catalog, ambiguous_component
from trivet.registry.contexts import EngineContextImpl, WorkerContextImpl
from trivet.registry.discovery import describe_objects
from trivet.registry.imports import import_problems, load_reducers
from trivet.registry.manager import Manager, build_manager, compile_observers, wrappers_of
from trivet.registry.plugin_set import (
    PluginSet,
    api_problems,
    describe_installed,
    describe_object,
    installed_problems,
    rebuild_object,
)
from trivet.registry.records import Origin, Plugin, listed
from trivet.registry.reports import PluginReport, RoleReport, report_plugin, report_role
from trivet.registry.selection import Choice, ExtensionChoice, RoleSelection, Selector
from trivet.registry.validation import PHASE_HOOKS, check_hooks, scan
from trivet.roles.base import CARDINALITY, ROLE_SIDES, Cardinality, Role, Side
from trivet_schemas.errors import unknown_name

if TYPE_CHECKING:
    from trivet.context import Context
    from trivet.events import CommitEvents
    from trivet.hooks import PhaseAdapter
    from trivet.plan import StepPlan
    from trivet.result import Reducer, StepResult
    from trivet.roles.executor import PendingStep
    from trivet.roles.scheduler import ScheduleInputs
    from trivet_schemas.config import EngineConfig

logger = logging.getLogger("trivet.registry")


class Registry:
    """The plugins of one engine (or of one worker process). See the package's docstring for the order of calls.

    Args:
        config: Which plugins are used, and their options.
        plugins: Objects that an embedder passes: modules or instances with hook implementations, objects of a role,
            :class:`~trivet.provider.Provider` and :class:`~trivet.provider.Component` descriptors.
        side: The side that this process is.
        required: Roles that must have a provider. None: all roles of cardinality one, less those of the worker's side
            when an executor was passed as an object, which may do without them.
        pins: See :data:`trivet.registry.selection.Pins`.

    Raises:
        PluginError: With every problem of the plugins that are in use, and every wrong name in the configuration.
    """

    def __init__(
        self,
        config: EngineConfig,
        plugins: Sequence[object] = (),
        *,
        side: Side = Side.ENGINE,
        required: Collection[str] | None = None,
        pins: Mapping[str, Sequence[Sequence[str]]] | None = None,
    ) -> None:
        self.config = config
        self.side = side
        self.stats = HookStats()
        self._catalog = Catalog(plugins)
        self._stopped: set[int] = set()
        self._frozen: Manager | None = None
        self._extensions: list[Plugin] = []
        self._workers: list[WorkerContextImpl] = []
        self.engine_context = EngineContextImpl(self)
        if required is None:
            required = self._default_required()
        selector = Selector(self._catalog, config, self.engine_context, required, pins)
        self._selector = selector
        self._catalog.check_active(selector.active)
        problems = selector.problems + [problem for plugin in selector.active for problem in plugin.problems]
        problems += self._catalog.duplicate_components(selector.active)
        if problems:
            raise PluginError(dict.fromkeys(problems))

    @classmethod
    def from_plugin_set(cls, data: PluginSet, *, side: Side = Side.WORKER) -> Registry:
        """The registry that ``data`` describes. Raises :class:`PluginError` if plugins or versions differ here."""
        from trivet_schemas.config import EngineConfig

        if problems := api_problems(data["api"]) + installed_problems(data["installed"], Catalog()):
            raise PluginError(problems)
        objects = [rebuild_object(entry) for entry in data["objects"]]
        return cls(EngineConfig(**data["config"]), objects, side=side, required=(), pins=data["selection"])

    def _default_required(self) -> list[str]:
        has_executor = any(offer.is_object for offer in self._catalog.offers("executor"))
        return [
            role
            for role, cardinality in CARDINALITY.items()
            if cardinality is Cardinality.ONE and not (has_executor and ROLE_SIDES[role] is Side.WORKER)
        ]

    # ------------------------------------------------------------ what was selected

    @property
    def active(self) -> list[Plugin]:
        """Plugins in use, in the order of registration."""
        return [*self._selector.active, *self._extensions]

    def selection(self, role: str) -> RoleSelection:
        """What was selected for a role."""
        return self._selector.roles[role]

    def choices(self) -> Iterator[Choice]:
        """Every selected provider."""
        for selection in self._selector.roles.values():
            yield from selection.choices

    def without_provider(self, role: str) -> str:
        """The message for a role that has no provider: which packages offer one."""
        return self._selector.without_provider(role)

    def choose(self, role: str, name: str, options: Mapping[str, Any]) -> Choice:
        """A provider by name with other options than the configuration's. Raises :class:`PluginError`."""
        return self._selector.choose(role, name, options)

    def find_component(self, kind: str, name: str) -> tuple[Plugin, Component]:
        """A component and its plugin. Raises :class:`PluginError` when there is none, or more than one."""
        parts = [(plugin, part) for plugin, part in self._catalog.components() if part.kind == kind]
        found = [(plugin, part) for plugin, part in parts if part.name == name]
        if not found:
            notes = "".join(f"; note: {plugin.problems[0]}" for plugin in self._catalog.plugins if plugin.failure)
            raise PluginError(unknown_name(kind, name, {part.name for _, part in parts}) + notes)
        if len(found) > 1:
            raise PluginError(ambiguous_component(kind, name, [plugin for plugin, _ in found]))
        return found[0]

    def component_names(self, kind: str) -> list[str]:
        """Names of all components of a kind."""
        return sorted({part.name for _, part in self._catalog.components() if part.kind == kind})

    def options(self, plugin: str) -> dict[str, Any]:
        """The options of a provider or extension by its name, or by its plugin's."""
        named: list[Choice | ExtensionChoice] = [choice for choice in self.choices() if choice.offer.name == plugin]
        named += [choice for choice in self._selector.extensions if choice.plugin.name == plugin]
        named += [choice for choice in self.choices() if choice.offer.plugin.name == plugin]
        if not named:
            return {}
        return dict(named[0].options) if named[0].model is None else named[0].model.model_dump()

    def reducers(self) -> dict[str, Reducer]:
        """Reducers of result extensions that the selected providers declare, imported. Raises :class:`PluginError`."""
        found: dict[str, Reducer] = {}
        for choice in self.choices():
            found |= load_reducers(choice.offer)
        return found

    def capabilities(self, role: str) -> list[Mapping[str, Any]]:
        """What the descriptors of a role's selected providers say of themselves; empty for an embedder's objects."""
        return [
            choice.offer.provider.capabilities if choice.offer.provider else {}
            for choice in self.selection(role).choices
        ]

    # ------------------------------------------------------------ the freeze

    def check_factories(self, roles: Collection[str] | None = None) -> None:
        """Import the factories of selected providers (of ``roles``; None: of all) and check their classes.

        Raises:
            PluginError: With every problem found.
        """
        problems: list[str] = []
        for choice in self.choices():
            if choice.offer.provider is not None and (roles is None or choice.offer.role in roles):
                problems += import_problems(choice.offer, worker_half=False)
        if problems:
            raise PluginError(dict.fromkeys(problems))

    def freeze(
        self,
        *,
        schedule: Callable[[ScheduleInputs], StepPlan] | None = None,
        run: Callable[[StepPlan], PendingStep] | None = None,
        commit: Callable[[StepPlan, StepResult], CommitEvents] | None = None,
    ) -> EngineHooks:
        """Build per-engine wrappers and observers, register everything, and refuse any change from then on.

        Phases can be bound here or later, with ``hooks.bind(phase, method)``.

        Raises:
            PluginError: A plugin's ``trivet_extend`` fails or returns something invalid, or a factory cannot be used.
        """
        if self._frozen is not None:
            raise PluginError("the plugins of this engine are frozen already")
        self.check_factories(self._needed(Side.ENGINE))
        manager, adapter, plugins = self._assemble(self.engine_context)
        self._extensions = plugins[len(self._selector.active) :]
        self._frozen = manager
        wrapped = {phase: wrappers_of(manager, f"trivet_{phase}") for phase in EngineHooks.phases}
        observers = compile_observers(plugins, self._catalog.specs)
        hooks = EngineHooks(manager, adapter, wrapped, self.stats, observers)
        if schedule is not None:
            hooks.bind("schedule", schedule)
        if run is not None:
            hooks.bind("run", run)
        if commit is not None:
            hooks.bind("commit", commit)
        return hooks

    def worker_context(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: str | None = None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokenizer_size: int | None = None,
    ) -> WorkerContextImpl:
        """A worker's context with its own frozen manager and facade (``context.hooks``), over the same plugins.

        ``device`` None takes the configuration's. In the engine's process the engine's tokenizer is shared.

        Raises:
            PluginError: As :meth:`freeze`, for the roles of the worker's side.
        """
        context = WorkerContextImpl(
            self,
            rank=rank,
            world_size=world_size,
            device=device if device is not None else self.config.device,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tokenizer_size=tokenizer_size,
            engine=self.engine_context if self.side is Side.ENGINE else None,
        )
        self.check_factories(self._needed(Side.WORKER))
        manager, adapter, _ = self._assemble(context)
        wrapped = {phase: wrappers_of(manager, f"trivet_{phase}") for phase in WorkerHooks.phases}
        context.hooks = WorkerHooks(manager, adapter, wrapped, self.stats)
        self._workers.append(context)
        return context

    def _needed(self, side: Side) -> list[str]:
        """Roles of a side whose objects will be built: not front ends, which an engine in Python never starts."""
        needed = self._selector.required.union(self.config.plugins) - {"frontend"}
        return [role for role in CARDINALITY if ROLE_SIDES[role] is side and role in needed]

    def _assemble(self, context: EngineContextImpl | WorkerContextImpl) -> tuple[Manager, PhaseAdapter, list[Plugin]]:
        plugins = list(self._selector.active)
        for plugin in self._selector.active:
            plugins += self._extend(plugin, context)
        problems = [problem for plugin in plugins for problem in plugin.problems]
        if problems:
            raise PluginError(dict.fromkeys(problems))
        manager, adapter = build_manager(plugins, self.stats)
        manager.freeze()
        context.manager = manager
        return manager, adapter, plugins

    def _extend(self, plugin: Plugin, context: Context) -> list[Plugin]:
        impl = plugin.implements("trivet_extend")
        if impl is None:
            return []
        try:
            returned = impl.function(context) if impl.arguments else impl.function()
            objects = list(returned)
        except Exception as exc:
            raise PluginError(
                f"{plugin.label}: trivet_extend at {impl.place} raised {type(exc).__name__}: {exc}"
            ) from exc
        extensions = describe_objects(objects, Origin.EXTENSION, prefix=f"{plugin.name}.")
        for extension in extensions:
            extension.distribution, extension.version = plugin.distribution, plugin.version
            scan(extension)
            check_hooks(extension, self._catalog.specs)
            if isinstance(extension.target, Role) and not extension.hooks:
                extension.report(
                    "trivet_extend returns wrappers and observers; offer a role's object through trivet_providers"
                )
            early = [impl.hook for impl in extension.hooks if impl.hook in hookspecs.PROVIDER_HOOKS]
            if early:
                extension.report(f"{listed(early)} is asked before trivet_extend, never of what it returns")
        return extensions

    # ------------------------------------------------------------ workers, reports, end

    def plugin_set(self) -> PluginSet:
        """This registry as plain data for :meth:`from_plugin_set` in another process.

        Raises:
            PluginError: Naming every object that a worker process could not rebuild.
        """
        problems, objects = [], []
        for plugin in self._selector.active:
            if plugin.origin is Origin.OBJECT:
                try:
                    objects.append(describe_object(plugin))
                except PluginError as exc:
                    problems += exc.problems
        if problems:
            raise PluginError(problems)
        return {
            "api": list(API_VERSION),
            "config": self._selector.resolved_config(),
            "installed": describe_installed(self._selector.active),
            "objects": objects,
            "selection": {
                role: [[choice.offer.plugin.name, choice.offer.name] for choice in selection.choices]
                for role, selection in self._selector.roles.items()
                if selection.choices
            },
        }

    def report(self) -> list[RoleReport]:
        """A record per role."""
        return [report_role(selection) for selection in self._selector.roles.values()]

    def plugins(self) -> list[PluginReport]:
        """A record per plugin: all that were discovered, also those that failed, then what ``trivet_extend`` built."""
        order = self.hook_order()
        return [report_plugin(plugin, self.active, order) for plugin in [*self._catalog.plugins, *self._extensions]]

    def hook_order(self) -> dict[str, list[str]]:
        """Hook → names of the active plugins that implement it, in call order (wrappers: outermost first)."""
        manager = self._frozen or build_manager(self.active, HookStats())[0]
        order: dict[str, list[str]] = {}
        for plugin in self.active:
            for impl in plugin.hooks:
                if impl.hook not in PHASE_HOOKS:
                    order.setdefault(impl.hook, []).append(plugin.name)
        for hook in PHASE_HOOKS:
            if names := wrappers_of(manager, hook):
                order[hook] = names
        return order

    def offered_hooks(self) -> list[str]:
        """Hooks that active plugins offer to others."""
        return self._catalog.hooks_of(self._selector.active)

    def shutdown(self) -> None:
        """Shut down what the contexts built: the engine's (its executor ends its workers), then workers left over."""
        self.engine_context.shutdown_all()
        while self._workers:
            self._workers.pop().shutdown_all()

    def shut_down(self, label: str, instance: Any) -> None:
        """Shut an object down, once. An exception is logged, so that the others are still shut down."""
        if id(instance) in self._stopped:
            return
        self._stopped.add(id(instance))
        try:
            instance.shutdown()
        except Exception:
            logger.exception("%s raised in shutdown", label)
