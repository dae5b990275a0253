"""Every hook that Trivet calls, in the order of an engine's life.

Each docstring has the same parts: what the hook is for, when it **fires**, the **default**, the **order** of
several implementations, what may be **mutated**, the **thread**, and the **hot-path class**: *start-up* (once),
*step* (at most one call per step, whatever the batch), *event* (only when something happened, with everything that
happened at once). No hook is ever called per token, per request or per layer.

Three kinds: **provider** hooks return descriptors, **phase** hooks can be wrapped (never plainly implemented) by
plugins, **observer** hooks are told and return nothing.

An entry point's plugin is active when one of its providers is selected, or when the configuration names the entry point
under ``plugins.extension``, a list: ``extension: [{use: my_wrapper, key: 7}]``. Such a module may declare, besides
hooks, ``trivet_options``, the :class:`trivet_schemas.options.Options` subclass that validates the keys next to ``use``,
and ``trivet_api``, the ``(major, minor)`` version of this interface that it was written for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trivet.context import Context, EngineContext
    from trivet.events import BlocksEvicted, BlocksStored, CommitEvents, RequestsAdded, RequestsFinished, StepFinished
    from trivet.plan import StepPlan
    from trivet.provider import Component, Provider
    from trivet.result import StepResult
    from trivet.roles.drafter import DraftInputs, Drafts
    from trivet.roles.executor import PendingStep
    from trivet.roles.model import ForwardBatch, ForwardOutput
    from trivet.roles.sampler import Sampled, SampleRows
    from trivet.roles.scheduler import ScheduleInputs

PROJECT = "trivet"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---------------------------------------------------------------- provider hooks: start-up, before the freeze


@hookspec
def trivet_add_hookspecs() -> Sequence[Any]:  # type: ignore[empty-body]
    """Offer hooks of one's own to other plugins.

    :returns: modules or objects whose functions carry ``trivet.hookspec``; registered before any other hook is read.

    Fires: first of all, once per engine and process. Default: none. Order: undefined; two plugins that offer the
    same name are an error. Mutability: none. Thread: the one that builds the engine. Hot path: start-up."""


@hookspec
def trivet_providers() -> Sequence[Provider]:  # type: ignore[empty-body]
    """Offer providers for roles, as descriptors: nothing is imported or built for one that is not selected.

    Fires: after ``trivet_add_hookspecs``, once per engine and process. Default: none. Order: irrelevant: a role's
    provider is chosen by the configuration or by ``suits``, never by order. Mutability: none. Thread: the one that
    builds the engine. Hot path: start-up."""


@hookspec
def trivet_components() -> Sequence[Component]:  # type: ignore[empty-body]
    """Offer small named parts that providers choose among by ``(kind, name)``: scheduling and victim policies, tool and
    reasoning parsers, transports, tier policies.

    Fires: after ``trivet_providers``. Default: none. Order: irrelevant; two parts with one kind and name are an error.
    Mutability: none. Thread: the one that builds the engine. Hot path: start-up.
    """


@hookspec
def trivet_extend(context: Context) -> Sequence[Any]:  # type: ignore[empty-body]
    """Build this engine's (or worker's) own wrappers and observers.

    :param context: what the plugin may use: configuration, roles in reach, its own options. ``context.side`` tells
    engine
        from worker; a plugin is asked on both.
    :returns: objects with ``trivet.hookimpl`` methods; they are validated like plugins, then registered.

    Fires: once per engine and once per worker, before the freeze. Default: none. Order: irrelevant.
    Mutability: none. Thread: the one that builds the engine or worker. Hot path: start-up.
    """


# ---------------------------------------------------------------- phase hooks: engine side


@hookspec(firstresult=True)
def trivet_schedule(inputs: ScheduleInputs) -> StepPlan:  # type: ignore[empty-body]
    """Make the plan of a step. Implemented by the core with the selected scheduler; plugins may only wrap it.

    Before ``yield`` a wrapper may change ``inputs.token_budget``, ``inputs.max_num_seqs`` and ``inputs.holds``;
    after it, it reads the plan and must return that very plan, which is read-only because blocks have been
    allocated for it. Only to ``plan.extensions`` it may add, under its plugin's name: the worker's side finds that in
    ``context.plan_extensions`` if the plan is sent (one that asks nothing of the workers is not).

    Fires: once per step. Default: the scheduler's ``schedule``, called without pluggy when nothing wraps. Order:
    pluggy's: ``tryfirst`` outermost, then the later registered. Mutability: ``inputs`` before ``yield``,
    ``plan.extensions`` after it. Thread: engine. Hot path: step. An exception leaves the state suspect: every request
    ends with it and the engine turns unhealthy."""


@hookspec(firstresult=True)
def trivet_run(plan: StepPlan) -> PendingStep:  # type: ignore[empty-body]
    """Send a plan to the workers. Implemented by the core with the selected executor; plugins may only wrap it.

    The result is a step on its way: with several steps in flight its ``result()`` is taken later.

    Fires: once per step. Default: the executor's ``submit``. Order: pluggy's. Mutability: none. Thread: engine.
    Hot path: step. An exception ends the requests of this plan; the engine goes on.
    """


@hookspec(firstresult=True)
def trivet_commit(plan: StepPlan, result: StepResult) -> CommitEvents:  # type: ignore[empty-body]
    """Take a result over into the request state. Implemented by the core; plugins may only wrap it, to observe.

    Fires: once per step, in step order. Default: the core's committer. Order: pluggy's. Mutability: none.
    Thread: engine. Hot path: step. An exception leaves the state suspect, as in ``trivet_schedule``.
    """


# ---------------------------------------------------------------- phase hooks: worker side


@hookspec(firstresult=True)
def trivet_forward(batch: ForwardBatch) -> ForwardOutput:  # type: ignore[empty-body]
    """Run the model over a batch. Implemented by the core with the selected model; plugins may only wrap it.

    Fires: once per step that has rows, on every worker. Default: the model's ``forward``. Order: pluggy's.
    Mutability: the output's tensors after ``yield``. Thread: the worker's. Hot path: step. An exception ends the
    requests of this plan; :class:`trivet.errors.RequestFault` ends the named ones only."""


@hookspec(firstresult=True)
def trivet_sample(logits: Any, rows: SampleRows) -> Sampled:  # type: ignore[empty-body]
    """Draw tokens from ``logits`` ``[L, vocab_size]``. Implemented by the core with the selected sampler; plugins
    may only wrap it.

    Before ``yield`` a wrapper may change ``logits`` in place, draft rows included; after it, it reads what was
    drawn and must return it.

    Fires: once per step with rows that reach the LM head, on the sampling worker. Default: the sampler's
    ``sample``. Order: pluggy's. Mutability: ``logits`` before ``yield``. Thread: the worker's. Hot path: step.
    Faults: as ``trivet_forward``."""


@hookspec(firstresult=True)
def trivet_draft(inputs: DraftInputs) -> Drafts:  # type: ignore[empty-body]
    """Propose tokens for the next step. Implemented by the core with the selected drafter; plugins may only wrap it.

    Fires: once per step in which a row wants proposals, or a drafter follows every step. Default: the drafters'
    ``propose``, each asked for the rows of its requests. Order: pluggy's. Mutability: the proposals after
    ``yield``. Thread: the worker's. Hot path: step. Faults: as ``trivet_forward``."""


# ---------------------------------------------------------------- observer hooks: engine side


@hookspec
def trivet_engine_started(context: EngineContext) -> None:
    """The engine is ready for its first request.

    Fires: once. Default: nothing. Order: registration; every observer is told, whatever the others do. Mutability:
    none. Thread: the one that builds the engine. Hot path: start-up. An observer that raises is logged once,
    counted and detached."""


@hookspec
def trivet_engine_stopped(reason: str) -> None:
    """The engine will take no further step; ``reason`` is ``shutdown`` or the fault that made it unhealthy.

    Fires: once. Default: nothing. Order: registration. Mutability: none. Thread: engine. Hot path: start-up.
    """


@hookspec
def trivet_requests_added(event: RequestsAdded) -> None:
    """Requests were accepted and queued, those since the last call at once.

    Fires: before scheduling, and before the end of a request is told that nobody was told of. Default: nothing.
    Order: registration. Mutability: none. Thread: engine. Hot path: event.
    """


@hookspec
def trivet_requests_finished(event: RequestsFinished) -> None:
    """Requests ended, with reasons and figures, those since the last call at once.

    Fires: at most once per step, at its end, and at the shutdown. Default: nothing. Order: registration.
    Mutability: none. Thread: engine. Hot path: event.
    """


@hookspec
def trivet_step_finished(event: StepFinished) -> None:
    """A step was committed: its plan, result and timings.

    Fires: once per step. Default: nothing. Order: registration. Mutability: none. Thread: engine. Hot path: step.
    """


@hookspec
def trivet_blocks_stored(event: BlocksStored) -> None:
    """Full blocks became findable in the prefix cache (or a tier), those of a step and KV group at once.

    Fires: after a commit, as often as ``Cache.take_events`` lists events, once per KV group. Default: nothing.
    Order: registration. Mutability: none. Thread: engine. Hot path: event."""


@hookspec
def trivet_blocks_evicted(event: BlocksEvicted) -> None:
    """Blocks can no longer be found: evicted, or everything was cleared, those of a step and KV group at once.

    Fires: as ``trivet_blocks_stored``, and before it. Default: nothing. Order: registration. Mutability: none.
    Thread: engine. Hot path: event."""


PROVIDER_HOOKS = ("trivet_add_hookspecs", "trivet_providers", "trivet_components", "trivet_extend")
ENGINE_PHASES = ("trivet_schedule", "trivet_run", "trivet_commit")
WORKER_PHASES = ("trivet_forward", "trivet_sample", "trivet_draft")
OBSERVER_HOOKS = (
    "trivet_engine_started",
    "trivet_engine_stopped",
    "trivet_requests_added",
    "trivet_requests_finished",
    "trivet_step_finished",
    "trivet_blocks_stored",
    "trivet_blocks_evicted",
)
