"""The plugin registry: discovered, validated, selected, frozen.

In the engine's process::

    registry = Registry(config, plugins)            # everything is checked here; PluginError lists all problems
    context = registry.engine_context               # EngineContextImpl
    context.on_hold, context.on_release = ...       # callables (request_id, hold) and (request_id, plugin, kind)
    context.table, context.planner, context.max_model_len = ...
    scheduler = context.get("scheduler")            # built on first use; context.all(role) for roles with many
    hooks = registry.freeze()                       # EngineHooks; asks trivet_extend; nothing can be registered afterwards
    hooks.bind("schedule", scheduler.schedule)      # also: registry.freeze(schedule=..., run=..., commit=...)
    plan = hooks.schedule(inputs)
    if hooks.has_observers("step_finished"):
        hooks.step_finished(event)
    context.shutdown_all()                          # reverse order of building

An executor in the same process makes its worker's context from the same plugins, with a manager and facade of its own::

    worker = context.worker_context(rank=0, world_size=1, device="cpu", max_num_seqs=8, max_num_batched_tokens=64,
                                    tokenizer_size=None)
    runner = worker.get("runner")
    worker.hooks.bind("forward", model.forward)     # done by the runner
    worker.shutdown_all()

and one with workers in other processes sends ``context.plugin_set()`` (plain data), from which each worker rebuilds the same
registry: ``Registry.from_plugin_set(data).worker_context(...)``.

Connectors and cache tiers are :class:`trivet.roles.TransferWorker` objects on a worker's side. Without a configuration,
:class:`Catalog` lists what is installed: ``Catalog().option_models()`` feeds ``collect_flat_names`` and the configuration's schema.

Which plugins are active: those whose provider is selected, those that ``plugins.extension`` names by their entry point, and the objects
passed by the embedder. They are registered in that order (by role, by list, by argument), then what ``trivet_extend`` returned.
"""

from __future__ import annotations

from trivet.registry.catalog import Catalog
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
]
