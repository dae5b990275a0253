"""What plugins get to see of an engine or worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trivet.roles.base import Side

if TYPE_CHECKING:
    from trivet.hooks import HookStats
    from trivet.planner import Planner
    from trivet.registry.plugin_set import PluginSet
    from trivet.result import Reducer
    from trivet.roles.kv import KVLayout
    from trivet.roles.runner import WorkerInfo
    from trivet.roles.scheduler import Wait
    from trivet.state import Request, RequestTable
    from trivet_schemas.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Hold:
    """A reason not to schedule a request. ``kind`` is a short word (grammar, transfer, parent, …), ``since``
    monotonic seconds; ``numbers`` go with the detail (``tokens``)."""

    kind: str
    plugin: str
    detail: str
    since: float
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParallelAxis:
    """A worker's place among those that share a model in one way: ``rank`` of ``size``, and whatever the executor
    talks to the others with (a process group)."""

    rank: int
    size: int
    group: Any = None


class Context(ABC):
    """Common part; one per engine and one per worker. Handed to factories and ``trivet_extend``."""

    side: Side
    config: EngineConfig

    @abstractmethod
    def get(self, role: str) -> Any:
        """The provider object of a role of cardinality one (or optional: None when there is none), built on first
        use."""

    @abstractmethod
    def all(self, role: str) -> Sequence[Any]:
        """The provider objects of a role with many providers, in configuration order."""

    @abstractmethod
    def build(self, role: str, name: str, *, config: EngineConfig | None = None, **options: Any) -> Any:
        """A further instance of a provider with its own options, which the caller shuts down. ``config`` is what it
        gets to see instead of the engine's: a drafter's second model is loaded from ``config.model``."""

    @abstractmethod
    def component(self, kind: str, name: str, **keywords: Any) -> Any:
        """Make a component; an unknown name is an error that lists those there are and suggests the nearest."""

    @abstractmethod
    def options(self, plugin: str) -> dict[str, Any]:
        """The options given to ``plugin`` in the configuration (any role), without ``use``."""

    def selected(self, role: str) -> list[tuple[str, dict[str, Any]]]:
        """Name and given options of the providers selected for a role, wherever they live: the same in the engine and
        in its workers, whatever ``auto`` meant."""
        return [(selection.use, dict(selection.options)) for selection in self.config.selections(role)]


class EngineContext(Context):
    """The engine's side. Valid after the freeze; everything here belongs to the engine's thread except
    :meth:`release`."""

    side = Side.ENGINE
    #: set before ``Cache.bind`` and ``Scheduler.bind``
    table: RequestTable
    planner: Planner
    max_model_len: int
    layout: KVLayout
    #: what the workers said of themselves
    info: WorkerInfo
    #: unfinished requests by id, the oldest first; read-only
    requests: Mapping[str, Request]
    #: what hooks of both sides cost in this process, and how often they failed
    hook_stats: HookStats
    #: keywords of ``Registry.worker_context`` for a worker in another process: set before ``Executor.start``
    worker_sizes: dict[str, int | None]

    @abstractmethod
    def hold(self, request_id: str, hold: Hold) -> None:
        """Keep a request from being scheduled until :meth:`release`; no effect for unknown or finished requests."""

    @abstractmethod
    def release(self, request_id: str, plugin: str, kind: str) -> None:
        """Take a hold back and wake the engine; may be called from any thread."""

    @abstractmethod
    def abort(self, request_id: str, message: str, reason: str = "error") -> None:
        """End a request from the engine's side, with ``message`` for its user; engine's thread, in any leg.

        A request without a slot ends at once (a scheduler that calls this gets :meth:`Scheduler.remove` for it, also
        inside ``schedule``); one that runs ends before the next plan is made, since the one at hand may name it. No
        effect for unknown or finished requests. Raises ValueError unless ``reason`` is ``error`` or ``abort``."""

    @abstractmethod
    def explain(self, request_id: str) -> Wait | None:
        """Why a request did not advance in the last step, see :meth:`trivet.Engine.explain`; without ``history``, so
        that it may be asked for many. Engine's thread."""

    @abstractmethod
    def plugin_set(self) -> PluginSet:
        """The plugins in use as plain data, from which ``Registry.from_plugin_set`` makes the same in a worker's
        process. Raises :class:`trivet.errors.PluginError` naming every object that cannot be made anew."""

    @abstractmethod
    def worker_context(self, *, rank: int = 0, world_size: int = 1, device: str | None = None) -> WorkerContext:
        """The context of a worker in this process, for executors; ``device`` None: the configuration's. The executor
        ends it with :meth:`WorkerContext.shutdown_all`."""

    @abstractmethod
    def reducers(self) -> dict[str, Reducer]:
        """By extension name, what joins the ranks' ``StepResult.extensions``: for ``reduce_results``."""


class WorkerContext(Context):
    """A worker's side."""

    side = Side.WORKER
    rank: int
    world_size: int
    #: by name (``tensor``, ``pipeline``, …); filled by an executor before it asks for the runner, empty for one worker
    parallel: Mapping[str, ParallelAxis] = MappingProxyType({})
    device: str
    #: the typed facade of this worker's phases
    hooks: Any
    #: limits fixed by the engine before the worker was built
    max_num_seqs: int
    max_num_batched_tokens: int
    #: ids the tokenizer knows; None when there is no tokenizer
    tokenizer_size: int | None
    #: set by the runner once the model has been loaded (context length, as limited by the configuration)
    max_model_len: int
    #: set by the runner when the KV storage was allocated, before anything is bound to it
    layout: KVLayout
    #: during a step: data of plugins in its plan, by plugin name
    plan_extensions: Mapping[str, bytes]
    #: during a step: data of plugins for its result, by plugin name; joined over ranks by the provider's ``reducers``
    result_extensions: dict[str, bytes]

    def shutdown_all(self) -> None:
        """Shut down what was built here, last first; called by the executor that asked for the context."""
