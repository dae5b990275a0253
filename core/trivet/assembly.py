"""Putting an engine together: plugins, model, KV negotiation, state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trivet.commit import Committer
from trivet.errors import CacheMemoryError, PluginError
from trivet.lifecycle import Lifecycle
from trivet.planner import Planner
from trivet.registry import Registry, known_flat_names
from trivet.roles import CacheRequirements, KVLayout, SchedulerLimits, WorkerInfo
from trivet.state import Request, RequestTable
from trivet_schemas.config import EngineConfig
from trivet_schemas.yaml_io import load_config_file

if TYPE_CHECKING:
    from trivet.hooks import EngineHooks
    from trivet.roles import Cache, Executor, Grammar, LogitsProcessor, Scheduler, Tokenizer

logger = logging.getLogger("trivet.engine")


@dataclass(slots=True)
class Parts:
    """Everything that an engine consists of."""

    config: EngineConfig
    registry: Registry
    context: Any
    hooks: EngineHooks
    limits: SchedulerLimits
    scheduler: Scheduler
    cache: Cache
    executor: Executor
    tokenizer: Tokenizer | None
    info: WorkerInfo
    layout: KVLayout
    max_model_len: int
    vocab_size: int  #: ids that a prompt may use
    table: RequestTable
    lifecycle: Lifecycle
    planner: Planner
    committer: Committer
    grammars: Sequence[Grammar] = ()
    processors: Sequence[LogitsProcessor] = ()
    wake: Callable[[], None] = field(default=lambda: None)
    #: when parts of the start began and ended, by ``time.perf_counter``: ``load`` (the model), ``allocate`` (KV cache,
    #: and what the worker prepares once it knows its memory)
    timeline: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def shutdown(self) -> None:
        """Shut every plugin down."""
        self.registry.shutdown()


def read_config(config: EngineConfig | Mapping[str, Any] | str, plugins: Sequence[object]) -> EngineConfig:
    """A configuration from what an embedder gives: itself, a mapping like the YAML file's, or the file's path."""
    if isinstance(config, EngineConfig):
        return config
    if isinstance(config, Mapping):
        return EngineConfig.from_flat(dict(config), known_flat_names(plugins, config.get("plugins")))
    return load_config_file(config, known_flat=lambda section: known_flat_names(plugins, section))


def assemble(config: EngineConfig | Mapping[str, Any] | str, plugins: Sequence[object]) -> Parts:
    """Build every part; whatever was started is shut down again when one of them fails."""
    settings = read_config(config, plugins)
    registry = Registry(settings, plugins)
    try:
        return _assemble(settings, registry)
    except MemoryError as error:
        registry.shutdown()
        raise too_large(error) from error
    except BaseException:
        registry.shutdown()
        raise


def too_large(error: MemoryError) -> CacheMemoryError:
    """What to say when the bookkeeping of an engine does not fit into memory."""
    return CacheMemoryError(
        f"memory is too small for this engine: {error}. Lower max_num_seqs of the scheduler or max_model_len, "
        "which decide the size of its tables, or choose a smaller model"
    )


def _assemble(config: EngineConfig, registry: Registry) -> Parts:
    context = registry.engine_context
    scheduler = context.get("scheduler")
    cache = context.get("cache")
    executor = context.get("executor")
    tokenizer = context.get("tokenizer")
    limits = scheduler.limits
    context.prepare_workers(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        tokenizer_size=None if tokenizer is None else tokenizer.size,
    )
    timeline = {}
    began = time.perf_counter()
    info = executor.start()
    timeline["load"] = (began, time.perf_counter())
    for spec, support in zip(info.specs, info.support, strict=True):
        if support.problem:
            raise PluginError(
                f"the selected attention plugin cannot serve layer {spec.layer} ({spec.kind}): {support.problem}"
            )
    depth = executor.max_in_flight if executor.token_feedback else 1
    in_flight = depth * (limits.max_num_batched_tokens + info.draft_lookahead)
    layout, max_model_len = negotiate(cache, info, limits, config.max_model_len, in_flight)
    for tier in context.all("cache_tier"):
        tier.check(context, layout)
    began = time.perf_counter()
    executor.configure_cache(layout)
    timeline["allocate"] = (began, time.perf_counter())
    table = RequestTable(limits.max_num_seqs, max_model_len)
    ends = frozenset(info.model.eos_token_ids) | frozenset(tokenizer.eos_token_ids if tokenizer is not None else ())
    eos = frozenset(token for token in ends if 0 <= token < info.model.vocab_size)  # others are never drawn
    connector = context.get("connector")
    lifecycle = Lifecycle(
        table,
        cache,
        scheduler,
        layout,
        stop_ids=lambda request: stop_ids(request, eos),
        draft_k=info.draft_tokens,
        connector=connector,
        recent_steps=config.recent_steps,
    )
    planner = Planner(
        table,
        cache,
        lifecycle,
        connector=connector,
        num_groups=len(layout.groups),
        token_feedback=executor.token_feedback,
        max_in_flight=executor.max_in_flight,
        draft_lookahead=info.draft_lookahead,
    )
    committer = Committer(table, cache, lifecycle, eos)
    context.table, context.planner, context.max_model_len = table, planner, max_model_len
    context.layout, context.info, context.requests = layout, info, MappingProxyType(lifecycle.requests)
    for tier in context.all("cache_tier"):
        tier.bind(context)
    cache.bind(context)
    scheduler.bind(context)
    hooks = registry.freeze()
    cache.observed = hooks.has_observers("blocks_stored") or hooks.has_observers("blocks_evicted")
    hooks.bind("schedule", scheduler.schedule)
    hooks.bind("commit", committer.commit)
    vocab = info.model.vocab_size if tokenizer is None else min(tokenizer.size, info.model.vocab_size)
    parts = Parts(
        config,
        registry,
        context,
        hooks,
        limits,
        scheduler,
        cache,
        executor,
        tokenizer,
        info,
        layout,
        max_model_len,
        vocab,
        table,
        lifecycle,
        planner,
        committer,
        grammars=context.all("grammar"),
        processors=context.all("logits_processor"),
        timeline=timeline,
    )
    _connect_holds(parts)
    return parts


def negotiate(
    cache: Cache, info: WorkerInfo, limits: SchedulerLimits, wanted: int | None, in_flight: int
) -> tuple[KVLayout, int]:
    """Sizes of the cache, and the context length: the model's, or as asked for, or what fits if nothing was asked
    for."""
    length = info.model.max_model_len if wanted is None else wanted

    def configure(max_model_len: int) -> KVLayout:
        return cache.configure(
            CacheRequirements(
                info.specs,
                info.support,
                info.available_bytes,
                max_model_len,
                limits.max_num_seqs,
                in_flight,
            )
        )

    try:
        return configure(length), length
    except CacheMemoryError as error:
        if wanted is not None or not error.fits_tokens:
            raise
        logger.warning(
            "max_model_len is lowered from %d to %d, which the KV cache memory holds", length, error.fits_tokens
        )
        return configure(error.fits_tokens), error.fits_tokens


def stop_ids(request: Request, eos: frozenset[int]) -> tuple[int, ...]:
    """Ids that end a request."""
    own = frozenset(getattr(request.params, "all_stop_token_ids", ()))
    return tuple(sorted(own if getattr(request.params, "ignore_eos", True) else own | eos))


def _connect_holds(parts: Parts) -> None:
    def hold(request_id: str, reason: Any) -> None:
        request = parts.lifecycle.requests.get(request_id)
        if request is not None:
            parts.lifecycle.hold(request, reason)

    def release(request_id: str, plugin: str, kind: str) -> None:
        request = parts.lifecycle.requests.get(request_id)
        if request is not None:
            parts.lifecycle.release_later(request, plugin, kind)
        parts.wake()

    def abort(request_id: str, message: str, reason: str) -> None:
        request = parts.lifecycle.requests.get(request_id)
        if request is not None:
            parts.lifecycle.abort(request, reason, message)

    parts.context.on_hold, parts.context.on_release, parts.context.on_abort = hold, release, abort
