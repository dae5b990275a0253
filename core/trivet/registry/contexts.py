"""The contexts of an engine and of a worker: they build providers on first use, and shut them down in reverse order."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from trivet.context import Context, EngineContext, Hold, WorkerContext
from trivet.errors import PluginError
from trivet.registry.imports import load, load_factory, load_worker_factory
from trivet.registry.records import Offer
from trivet.roles import ROLE_CLASSES
from trivet.roles.base import CARDINALITY, ROLE_SIDES, Cardinality, Side
from trivet.roles.connector import TransferWorker
from trivet_schemas.errors import unknown_name

if TYPE_CHECKING:
    from trivet.hooks import WorkerHooks
    from trivet.registry.manager import Manager
    from trivet.registry.plugin_set import PluginSet
    from trivet.registry.registry import Registry
    from trivet.registry.selection import Choice
    from trivet.result import Reducer
    from trivet.roles.scheduler import Wait
    from trivet_schemas.config import EngineConfig

#: roles that a side never holds; the others a side may build for itself (the engine validates with its own grammars)
_APART = {
    Side.ENGINE: frozenset({"runner", "model", "attention", "quantization", "sampler"}),
    Side.WORKER: frozenset({"scheduler", "cache", "executor", "frontend"}),
}
#: roles whose worker half is another class, see :class:`trivet.roles.TransferWorker`
_HALVED = frozenset({"connector", "cache_tier"})


class _Built(Context):
    """What both contexts share: instances by choice, made once, under a lock."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.config = registry.config
        self.manager: Manager | None = None
        self._instances: dict[int, Any] = {}
        self._order: list[tuple[str, Any]] = []
        self._building: list[str] = []
        self._lock = threading.RLock()
        self._own: _Built = self

    def get(self, role: str) -> Any:
        """The provider object of a role that takes one, built on first use; None for an optional role without one."""
        cardinality = self._cardinality(role)
        if cardinality not in {Cardinality.ONE, Cardinality.OPTIONAL}:
            raise PluginError(f"role {role!r} takes several providers; use all({role!r})")
        found = self.all(role)
        if found:
            return found[0]
        if cardinality is Cardinality.ONE and role not in _HALVED:
            selection = self.registry.selection(role)
            raise PluginError(selection.problem or self.registry.without_provider(role))
        return None

    def all(self, role: str) -> Sequence[Any]:
        """The provider objects of a role in configuration order, built on first use."""
        self._cardinality(role)
        built = [self._instance(choice) for choice in self.registry.selection(role).choices]
        return tuple(instance for instance in built if instance is not None)

    def build(self, role: str, name: str, *, config: EngineConfig | None = None, **options: Any) -> Any:
        """A further instance with its own options, checked as those of the configuration; the caller shuts it down."""
        self._cardinality(role)
        choice = self.registry.choose(role, name, options)
        with self._lock:
            return (self if config is None else self._seen_with(config))._make(choice)

    def _seen_with(self, config: EngineConfig) -> Self:
        view = copy.copy(self)  # over the same instances, which are built with the engine's configuration
        view.config = config
        return view

    def component(self, kind: str, name: str, **keywords: Any) -> Any:
        """Make a component by ``(kind, name)`` of any plugin that is installed or was passed."""
        plugin, component = self.registry.find_component(kind, name)
        factory = load(component.factory, f"{plugin.label}: factory of {kind} {name!r}")
        return factory(**keywords)

    def options(self, plugin: str) -> dict[str, Any]:
        """The options of a provider or extension, with defaults when it declares a model; empty if it has none."""
        return self.registry.options(plugin)

    def selected(self, role: str) -> list[tuple[str, dict[str, Any]]]:
        """Name and given options of the providers selected for a role."""
        return [(choice.offer.name, dict(choice.options)) for choice in self.registry.selection(role).choices]

    def hook(self, name: str) -> Callable[..., Any]:
        """The caller of a hook that a plugin offers through ``trivet_add_hookspecs``, by keywords; Trivet's own hooks
        are called by the engine alone."""
        if self.manager is None:
            raise PluginError(f"hook {name!r} cannot be called before the freeze")
        offered = self.registry.offered_hooks()
        if name not in offered:
            raise PluginError(unknown_name("hook offered by a plugin", name, offered))
        return getattr(self.manager.hook, name)  # type: ignore[no-any-return]

    def shutdown_all(self) -> None:
        """Shut down what this context built, last first. An exception is logged, and the others are still shut down."""
        with self._lock:
            while self._order:
                label, instance = self._order.pop()
                self.registry.shut_down(label, instance)
            self._instances.clear()

    def _cardinality(self, role: str) -> Cardinality:
        if role not in CARDINALITY:
            raise PluginError(unknown_name("role", role, CARDINALITY))
        if role in _APART[self.side]:
            other = Side.WORKER if self.side is Side.ENGINE else Side.ENGINE
            raise PluginError(
                f"role {role!r} lives on the {other.value}'s side, out of reach of the {self.side.value}'s context"
            )
        return CARDINALITY[role]

    def _instance(self, choice: Choice) -> Any:
        key = id(choice)
        with self._lock:
            if key not in self._instances:
                self._instances[key] = instance = self._own._make(choice)
                if instance is not None:
                    self._order.append((choice.offer.label, instance))
            return self._instances[key]

    def _make(self, choice: Choice) -> Any:
        offer = choice.offer
        title = f"{offer.role} {offer.name!r}"
        if title in self._building:
            circle = " -> ".join([*self._building[self._building.index(title) :], title])
            raise PluginError(
                f"providers need each other while they are built: {circle}; look the other one up later, in bind()"
            )
        self._building.append(title)
        try:
            return self._construct(choice)
        finally:
            self._building.pop()

    def _construct(self, choice: Choice) -> Any:
        offer = choice.offer
        if offer.instance is not None:
            return offer.instance
        return self._checked(offer, load_factory(offer)(self, _options_of(choice)), ROLE_CLASSES[offer.role])

    @staticmethod
    def _checked(offer: Offer, instance: Any, expected: type) -> Any:
        if not isinstance(instance, expected):
            raise PluginError(
                f"{offer.label}: the factory made {instance!r}, which is no trivet.roles.{expected.__name__}"
            )
        return instance


def _options_of(choice: Choice) -> Any:
    if choice.model is not None:
        return choice.model
    from trivet_schemas.options import Options

    return Options()


class EngineContextImpl(_Built, EngineContext):
    """The engine's context. The engine sets what :class:`trivet.context.EngineContext` declares, ``on_hold``,
    ``on_release``, ``on_abort`` and ``on_explain``."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.on_hold: Callable[[str, Hold], None] | None = None
        self.on_release: Callable[[str, str, str], None] | None = None
        self.on_abort: Callable[[str, str, str], None] | None = None
        self.on_explain: Callable[[str], Wait | None] | None = None
        self.hook_stats = registry.stats
        self.worker_sizes: dict[str, int | None] = {}

    def hold(self, request_id: str, hold: Hold) -> None:
        """Keep a request from being scheduled until :meth:`release`."""
        if self.on_hold is None:
            raise RuntimeError("requests can be held once the engine runs")
        self.on_hold(request_id, hold)

    def release(self, request_id: str, plugin: str, kind: str) -> None:
        """Take a hold back and wake the engine; may be called from any thread."""
        if self.on_release is None:
            raise RuntimeError("requests can be released once the engine runs")
        self.on_release(request_id, plugin, kind)

    def abort(self, request_id: str, message: str, reason: str = "error") -> None:
        """End a request from the engine's side, see :meth:`EngineContext.abort`."""
        if reason not in ("error", "abort"):
            raise ValueError(f"reason must be 'error' or 'abort', got {reason!r}")
        if self.on_abort is None:
            raise RuntimeError("requests can be ended once the engine runs")
        self.on_abort(request_id, message, reason)

    def explain(self, request_id: str) -> Wait | None:
        """Why a request did not advance in the last step."""
        if self.on_explain is None:
            raise RuntimeError("requests can be explained once the engine runs")
        return self.on_explain(request_id)

    def prepare_workers(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, tokenizer_size: int | None = None
    ) -> None:
        """Fix the sizes that every worker is built for; called by the engine before the executor starts."""
        self.worker_sizes = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "tokenizer_size": tokenizer_size,
        }

    def worker_context(self, *, rank: int = 0, world_size: int = 1, device: str | None = None) -> WorkerContextImpl:
        """A worker's context in this process, with the sizes of :meth:`prepare_workers`."""
        sizes: Any = self.worker_sizes
        return self.registry.worker_context(rank=rank, world_size=world_size, device=device, **sizes)

    def plugin_set(self) -> PluginSet:
        """See :meth:`Registry.plugin_set`."""
        return self.registry.plugin_set()

    def reducers(self) -> dict[str, Reducer]:
        """See :meth:`Registry.reducers`."""
        return self.registry.reducers()

    def shutdown_all(self) -> None:
        """Shut down what was built, last first, then the embedder's objects that nobody asked for."""
        super().shutdown_all()
        for choice in self.registry.choices():
            if choice.offer.instance is not None:
                self.registry.shut_down(choice.offer.label, choice.offer.instance)


class WorkerContextImpl(_Built, WorkerContext):
    """A worker's context. In the engine's process it shares the engine's tokenizer and builds everything else."""

    hooks: WorkerHooks

    def __init__(
        self,
        registry: Registry,
        *,
        rank: int,
        world_size: int,
        device: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokenizer_size: int | None,
        engine: EngineContextImpl | None,
    ) -> None:
        super().__init__(registry)
        self.rank, self.world_size, self.device = rank, world_size, device
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.tokenizer_size = tokenizer_size
        self._engine = engine

    def all(self, role: str) -> Sequence[Any]:
        """As on the engine's side; a connector or tier is its worker half here, and is left out when it has none."""
        if role == "tokenizer" and self._engine is not None:
            return self._engine.all(role)
        return super().all(role)

    def shutdown_all(self) -> None:
        """Shut down what this worker built, and the embedder's objects of roles that live here."""
        super().shutdown_all()
        for choice in self.registry.choices():
            if choice.offer.instance is not None and ROLE_SIDES[choice.offer.role] is Side.WORKER:
                self.registry.shut_down(choice.offer.label, choice.offer.instance)

    def _construct(self, choice: Choice) -> Any:
        offer = choice.offer
        if offer.role not in _HALVED:
            return super()._construct(choice)
        factory = load_worker_factory(offer)
        if factory is None:
            return None
        return self._checked(offer, factory(self, _options_of(choice)), TransferWorker)
