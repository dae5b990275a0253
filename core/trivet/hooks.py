"""The typed facade of the hooks: one method per hook, and nothing else calls pluggy.

A **phase** slot (``hooks.schedule``) is, once bound, the selected provider's own bound method when no plugin wraps the
phase, so that a step without wrappers makes no pluggy call at all; otherwise it is one pluggy call, with the provider's
method as the only implementation below its wrappers. **Observers** are compiled into plain callables, each called in
its own ``try``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from trivet import hookspecs

if TYPE_CHECKING:
    import pluggy

    from trivet.context import EngineContext
    from trivet.events import BlocksEvicted, BlocksStored, CommitEvents, RequestsAdded, RequestsFinished, StepFinished
    from trivet.plan import StepPlan
    from trivet.result import StepResult
    from trivet.roles.drafter import Drafter, DraftInputs, Drafts
    from trivet.roles.executor import Executor, PendingStep
    from trivet.roles.model import ForwardBatch, ForwardOutput, Model
    from trivet.roles.sampler import Sampled, Sampler, SampleRows
    from trivet.roles.scheduler import ScheduleInputs, Scheduler

logger = logging.getLogger("trivet.hooks")


@dataclass(frozen=True, slots=True)
class Observer:
    """A compiled observer: ``call`` takes all of the hook's arguments, by position."""

    plugin: str
    call: Callable[..., Any]


class HookStats:
    """What hooks cost and how often they failed, by ``(plugin, hook)``; shared by a facade and its wrappers."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)


class _Hooks:
    """Slots of phases, and what both facades share."""

    phases: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        manager: pluggy.PluginManager,
        adapter: PhaseAdapter,
        wrapped: Mapping[str, Sequence[str]] | None = None,
        stats: HookStats | None = None,
    ) -> None:
        self._relay = manager.hook
        self._adapter = adapter
        self._wrapped = {phase: tuple(names) for phase, names in (wrapped or {}).items() if names}
        self.stats = stats or HookStats()
        #: calls that went through pluggy
        self.pluggy_calls = 0

    @property
    def errors(self) -> Counter[tuple[str, str]]:
        """Exceptions by ``(plugin, hook)``."""
        return self.stats.errors

    def wrappers(self, phase: str) -> tuple[str, ...]:
        """Names of the plugins that wrap a phase, outermost first."""
        self._check_phase(phase)
        return self._wrapped.get(phase, ())

    def _bind(self, phase: str, method: Callable[..., Any]) -> None:
        self._check_phase(phase)
        if phase in self._wrapped:
            self._adapter.methods[phase] = method
            setattr(self, phase, getattr(self, f"_call_{phase}"))
        else:
            setattr(self, phase, method)

    def _check_phase(self, phase: str) -> None:
        if phase not in self.phases:
            raise ValueError(f"unknown phase {phase!r}; {type(self).__name__} has {', '.join(self.phases)}")

    def __getattr__(self, name: str) -> Any:
        # Reached only while the slot is empty: a bound phase is an instance attribute.
        if name in type(self).phases:
            raise AttributeError(f"phase {name!r} is not bound yet: call bind({name!r}, method) first")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class PhaseAdapter:
    """The core's implementation of every phase, below the wrappers: calls the bound method."""

    def __init__(self) -> None:
        self.methods: dict[str, Callable[..., Any]] = {}

    @hookspecs.hookimpl
    def trivet_schedule(self, inputs: ScheduleInputs) -> StepPlan:
        """Call the scheduler."""
        return self.methods["schedule"](inputs)  # type: ignore[no-any-return]

    @hookspecs.hookimpl
    def trivet_run(self, plan: StepPlan) -> PendingStep:
        """Call the executor."""
        return self.methods["run"](plan)  # type: ignore[no-any-return]

    @hookspecs.hookimpl
    def trivet_commit(self, plan: StepPlan, result: StepResult) -> CommitEvents:
        """Call the committer."""
        return self.methods["commit"](plan, result)  # type: ignore[no-any-return]

    @hookspecs.hookimpl
    def trivet_forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Call the model."""
        return self.methods["forward"](batch)  # type: ignore[no-any-return]

    @hookspecs.hookimpl
    def trivet_sample(self, logits: Any, rows: SampleRows) -> Sampled:
        """Call the sampler."""
        return self.methods["sample"](logits, rows)  # type: ignore[no-any-return]

    @hookspecs.hookimpl
    def trivet_draft(self, inputs: DraftInputs) -> Drafts:
        """Call the drafter."""
        return self.methods["draft"](inputs)  # type: ignore[no-any-return]


class EngineHooks(_Hooks):
    """Hooks of the engine's side. Everything here belongs to the engine's thread."""

    phases = ("schedule", "run", "commit")

    if TYPE_CHECKING:
        schedule: Callable[[ScheduleInputs], StepPlan]
        run: Callable[[StepPlan], PendingStep]
        commit: Callable[[StepPlan, StepResult], CommitEvents]

    def __init__(
        self,
        manager: pluggy.PluginManager,
        adapter: PhaseAdapter,
        wrapped: Mapping[str, Sequence[str]] | None = None,
        stats: HookStats | None = None,
        observers: Mapping[str, Sequence[Observer]] | None = None,
    ) -> None:
        super().__init__(manager, adapter, wrapped, stats)
        self._observers = {name: tuple((observers or {}).get(name, ())) for name in hookspecs.OBSERVER_HOOKS}

    @overload
    def bind(self, phase: Literal["schedule"], method: Callable[[ScheduleInputs], StepPlan]) -> None: ...
    @overload
    def bind(self, phase: Literal["run"], method: Callable[[StepPlan], PendingStep]) -> None: ...
    @overload
    def bind(self, phase: Literal["commit"], method: Callable[[StepPlan, StepResult], CommitEvents]) -> None: ...

    def bind(self, phase: str, method: Callable[..., Any]) -> None:
        """Fill the slot of a phase with the method of the selected provider, below its wrappers if there are any."""
        self._bind(phase, method)

    def _call_schedule(self, inputs: ScheduleInputs) -> StepPlan:
        self.pluggy_calls += 1
        return self._relay.trivet_schedule(inputs=inputs)  # type: ignore[no-any-return]

    def _call_run(self, plan: StepPlan) -> PendingStep:
        self.pluggy_calls += 1
        return self._relay.trivet_run(plan=plan)  # type: ignore[no-any-return]

    def _call_commit(self, plan: StepPlan, result: StepResult) -> CommitEvents:
        self.pluggy_calls += 1
        return self._relay.trivet_commit(plan=plan, result=result)  # type: ignore[no-any-return]

    def has_observers(self, name: str) -> bool:
        """Whether anyone observes ``name`` (``step_finished`` or ``trivet_step_finished``), so that its event is worth
        making."""
        return bool(self._observers[name if name in self._observers else f"trivet_{name}"])

    def engine_started(self, context: EngineContext) -> None:
        """Tell the observers of ``trivet_engine_started``."""
        self._tell("trivet_engine_started", context)

    def engine_stopped(self, reason: str) -> None:
        """Tell the observers of ``trivet_engine_stopped``."""
        self._tell("trivet_engine_stopped", reason)

    def requests_added(self, event: RequestsAdded) -> None:
        """Tell the observers of ``trivet_requests_added``."""
        self._tell("trivet_requests_added", event)

    def requests_finished(self, event: RequestsFinished) -> None:
        """Tell the observers of ``trivet_requests_finished``."""
        self._tell("trivet_requests_finished", event)

    def step_finished(self, event: StepFinished) -> None:
        """Tell the observers of ``trivet_step_finished``."""
        self._tell("trivet_step_finished", event)

    def blocks_stored(self, event: BlocksStored) -> None:
        """Tell the observers of ``trivet_blocks_stored``."""
        self._tell("trivet_blocks_stored", event)

    def blocks_evicted(self, event: BlocksEvicted) -> None:
        """Tell the observers of ``trivet_blocks_evicted``."""
        self._tell("trivet_blocks_evicted", event)

    def _tell(self, hook: str, *arguments: Any) -> None:
        for observer in self._observers[hook]:
            key = (observer.plugin, hook)
            start = time.perf_counter()
            try:
                observer.call(*arguments)
            except Exception:
                # One failure is enough: an observer whose state is in doubt is not told again, and nobody else notices.
                self.stats.errors[key] += 1
                self._observers[hook] = tuple(other for other in self._observers[hook] if other is not observer)
                logger.exception("plugin %r raised in %s; it is no longer told", observer.plugin, hook)
            self.stats.calls[key] += 1
            self.stats.seconds[key] += time.perf_counter() - start


class WorkerHooks(_Hooks):
    """Hooks of a worker's side. Everything here belongs to the worker's step thread."""

    phases = ("forward", "sample", "draft")

    if TYPE_CHECKING:
        forward: Callable[[ForwardBatch], ForwardOutput]
        sample: Callable[[Any, SampleRows], Sampled]
        draft: Callable[[DraftInputs], Drafts]

    @overload
    def bind(self, phase: Literal["forward"], method: Callable[[ForwardBatch], ForwardOutput]) -> None: ...
    @overload
    def bind(self, phase: Literal["sample"], method: Callable[[Any, SampleRows], Sampled]) -> None: ...
    @overload
    def bind(self, phase: Literal["draft"], method: Callable[[DraftInputs], Drafts]) -> None: ...

    def bind(self, phase: str, method: Callable[..., Any]) -> None:
        """Fill the slot of a phase with the method of the selected provider, below its wrappers if there are any."""
        self._bind(phase, method)

    def _call_forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.pluggy_calls += 1
        return self._relay.trivet_forward(batch=batch)  # type: ignore[no-any-return]

    def _call_sample(self, logits: Any, rows: SampleRows) -> Sampled:
        self.pluggy_calls += 1
        return self._relay.trivet_sample(logits=logits, rows=rows)  # type: ignore[no-any-return]

    def _call_draft(self, inputs: DraftInputs) -> Drafts:
        self.pluggy_calls += 1
        return self._relay.trivet_draft(inputs=inputs)  # type: ignore[no-any-return]


if TYPE_CHECKING:
    # The type checker compares facade, specs and role methods here: each must be able to fill the slot.
    def _engine_slots_agree(hooks: EngineHooks, scheduler: Scheduler, executor: Executor) -> None:
        hooks.schedule = scheduler.schedule
        hooks.schedule = hookspecs.trivet_schedule
        hooks.run = executor.submit
        hooks.run = hookspecs.trivet_run
        hooks.commit = hookspecs.trivet_commit

    def _worker_slots_agree(hooks: WorkerHooks, model: Model, sampler: Sampler, drafter: Drafter) -> None:
        hooks.forward = model.forward
        hooks.forward = hookspecs.trivet_forward
        hooks.sample = sampler.sample
        hooks.sample = hookspecs.trivet_sample
        hooks.draft = drafter.propose
        hooks.draft = hookspecs.trivet_draft

    def _observers_agree(hooks: EngineHooks) -> None:
        started: Callable[[EngineContext], None] = hooks.engine_started
        started = hookspecs.trivet_engine_started
        stopped: Callable[[str], None] = hooks.engine_stopped
        stopped = hookspecs.trivet_engine_stopped
        added: Callable[[RequestsAdded], None] = hooks.requests_added
        added = hookspecs.trivet_requests_added
        finished: Callable[[RequestsFinished], None] = hooks.requests_finished
        finished = hookspecs.trivet_requests_finished
        step: Callable[[StepFinished], None] = hooks.step_finished
        step = hookspecs.trivet_step_finished
        stored: Callable[[BlocksStored], None] = hooks.blocks_stored
        stored = hookspecs.trivet_blocks_stored
        evicted: Callable[[BlocksEvicted], None] = hooks.blocks_evicted
        evicted = hookspecs.trivet_blocks_evicted
        del started, stopped, added, finished, step, stored, evicted
