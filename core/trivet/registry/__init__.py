"""The plugin registry: discovered, validated, selected, frozen.

In the engine's process::

    registry = Registry(config, plugins)            # everything is checked here; PluginError lists all problems
    context = registry.engine_context               # EngineContextImpl
    scheduler = context.get("scheduler")            # built on first use; context.all(role) for roles with many
    context.prepare_workers(max_num_seqs=8, max_num_batched_tokens=64, tokenizer_size=None)
    context.table, context.planner, context.max_model_len = ...
    context.on_hold, context.on_release = ...       # callables (request_id, hold) and (request_id, plugin, kind)
    hooks = registry.freeze()                       # EngineHooks; asks trivet_extend; then nothing can be registered
    hooks.bind("schedule", scheduler.schedule)      # also: registry.freeze(schedule=..., run=..., commit=...)
    plan = hooks.schedule(inputs)
    if hooks.has_observers("step_finished"):
        hooks.step_finished(event)
    registry.shutdown()                             # reverse order of building, also after a failed start

An executor in the same process makes its worker's context from the same plugins, with a manager and facade of its own::

    worker = context.worker_context(rank=0, world_size=1, device="cpu")
    runner = worker.get("runner")
    worker.hooks.bind("forward", model.forward)     # done by the runner
    worker.shutdown_all()

and one with workers in other processes sends ``context.plugin_set()`` (plain data), from which each worker rebuilds the
same registry: ``Registry.from_plugin_set(data).worker_context(rank=rank, world_size=n, **context.worker_sizes)``.

Connectors and cache tiers are :class:`trivet.roles.TransferWorker` objects on a worker's side. Before there is a
configuration, :class:`Catalog` lists what is installed: ``Catalog().option_models()`` feeds the configuration's schema,
``Catalog().check()`` gives the problems of everything installed, used or not (``trivet plugins check``),
and :func:`known_flat_names` gives the flat arguments that ``EngineConfig.from_flat`` takes.

Which plugins are active: those whose provider is selected, those that ``plugins.extension`` names by their entry point,
and the objects passed by the embedder. They are registered in that order (by role, by list, by argument), then what
``trivet_extend`` returned.
"""

from __future__ import annotations

from trivet.registry.catalog import Catalog, known_flat_names
from trivet.registry.contexts import EngineContextImpl, WorkerContextImpl
from trivet.registry.offers import EXTENSION
from trivet.registry.plugin_set import PluginSet
from trivet.registry.registry import Registry
from trivet.registry.reports import CandidateReport, ChosenProvider, HookReport, PluginReport, RoleReport
from trivet.registry.validation import DEPRECATION_POLICY

__all__ = [
    "DEPRECATION_POLICY",
    "EXTENSION",
    "CandidateReport",
    "Catalog",
    "ChosenProvider",
    "EngineContextImpl",
    "HookReport",
    "PluginReport",
    "PluginSet",
    "Registry",
    "RoleReport",
    "WorkerContextImpl",
    "known_flat_names",
]
