"""The memory plan of ``trivet config check``: what a start would allocate, and what would fit where that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trivet.assembly import too_large
from trivet.errors import CacheMemoryError, TrivetError
from trivet.launcher._model_files import ModelFiles, read_model
from trivet.model_source import ModelLocation, find_model
from trivet.registry.records import Origin
from trivet.roles import CacheRequirements, KVLayout, MemoryEstimate, ModelInfo
from trivet.sizing import format_bytes
from trivet_schemas.options import format_size

if TYPE_CHECKING:
    from trivet.registry import Registry
    from trivet.registry.contexts import WorkerContextImpl
    from trivet.registry.selection import Choice
    from trivet.roles import Cache, Executor, Runner, SchedulerLimits
    from trivet_schemas.config import EngineConfig

#: token budgets that are tried when a smaller one might help
_BUDGETS = (2048, 1024, 512, 256)
_NARROW = ("fp8_e4m3", "fp8_e5m2", "bfloat16")


@dataclass(slots=True)
class GroupPlan:
    """Layers that share a block table."""

    layers: int
    kind: str
    window: int | None
    block_size: int


@dataclass(slots=True)
class TierPlan:
    """What a cache tier takes besides; None: nothing of that kind."""

    name: str
    host_memory: int | None
    disk_memory: int | None


@dataclass(slots=True)
class MemoryPlan:
    """Sizes in bytes; None for what the files do not tell."""

    model: str
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None  #: whose sizes the weights in memory have, besides ``dtype``
    weights_on_disk: int | None = None
    weights_in_memory: int | None = None
    workspace: int | None = None  #: an estimate
    kv_dtype: str | None = None
    kv_bytes_per_token: int | None = None
    kv_bytes_per_request: int | None = None  #: of the full length
    max_model_len: int | None = None
    groups: list[GroupPlan] = field(default_factory=list)
    cache_bytes: int | None = None
    num_blocks: int | None = None  #: usable ones
    #: those of requests of the full length, where layers have windows or blocks are reserved
    num_tokens: int | None = None
    num_full_requests: int | None = None
    tiers: list[TierPlan] = field(default_factory=list)
    total: int | None = None  #: weights, workspace, KV cache, and the tiers' host memory where it is the same
    free: int | None = None  #: at present, for all of it
    notes: list[str] = field(default_factory=list)
    #: why an engine could not start like this, and what would help
    problems: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Lines for people."""
        yield "model", self.model
        if self.weights_on_disk is not None:
            yield "weights on disk", format_size(self.weights_on_disk)
        if self.weights_in_memory is not None:
            kinds = " and ".join(kind for kind in (self.quantization, self.dtype) if kind is not None)
            yield "weights in memory", format_size(self.weights_in_memory) + (f" as {kinds}" if kinds else "")
        if self.workspace is not None:
            yield "workspace", f"{format_size(self.workspace)} in the largest step, an estimate"
        if self.kv_bytes_per_token is not None:
            narrower = f", as {self.kv_dtype}" if self.kv_dtype != self.dtype else ""
            yield "KV cache per token", f"{format_size(self.kv_bytes_per_token)}{narrower}"
        if self.max_model_len is not None:
            size = f", {format_size(self.kv_bytes_per_request)} of KV cache" if self.kv_bytes_per_request else ""
            yield "longest request", f"{self.max_model_len} tokens (max_model_len){size}"
        for count, group in _runs(self.groups):
            many = f"{count} x " if len(self.groups) > 1 else ""
            window = "" if group.window is None else f", window {group.window}"
            yield "KV groups", f"{many}{group.layers} layers, {group.kind}{window}, blocks of {group.block_size} tokens"
        if self.cache_bytes is not None:
            yield "KV cache", f"{format_size(self.cache_bytes)}, {self.num_blocks} blocks"
        if self.num_tokens is not None:
            yield "", f"{self.num_tokens} tokens, {self.num_full_requests} requests of the full length at once"
        for tier in self.tiers:
            sizes = (("host memory", tier.host_memory), ("disk", tier.disk_memory))
            yield f"cache tier {tier.name}", ", ".join(f"{n} {format_size(v)}" for n, v in sizes if v is not None)
        if self.total is not None and self.free is not None:
            yield "total", f"{format_size(self.total)} of {format_size(self.free)} free on {self.device}"
        for note in self.notes:
            yield "note", note
        for problem in self.problems:
            yield "does not fit", problem


def _runs(groups: Sequence[GroupPlan]) -> Iterator[tuple[int, GroupPlan]]:
    """How many groups that are alike follow each other."""
    for _, run in groupby(groups, key=astuple):
        members = list(run)
        yield len(members), members[0]


def plan_memory(config: EngineConfig, registry: Registry) -> MemoryPlan:
    """Read the model's configuration or header, ask the attention plugin what it can do and the runner what is free,
    and let the selected cache plan its blocks.

    Raises:
        ModelLoadError: The model's files are missing or damaged, there is no such device, or the model refuses the
            configuration.
        PluginError: A plugin of the worker's side cannot be built.
    """
    plan = MemoryPlan(config.model)
    try:
        worker = _worker(registry)
        worker.get("model").check()
        (model,) = registry.selection("model").choices
        if model.offer.plugin.origin is not Origin.BUNDLED:
            _settle_device(config, registry, worker)
            plan.device, plan.weights_in_memory = worker.device, worker.get("model").plan_weights()
            rest = "" if plan.weights_in_memory is None else "the rest is "
            plan.notes.append(f"{rest}known when the model is loaded, by {model.offer.label}")
            return plan
        location = find_model(config.model, config.revision)
        if location is None:
            plan.notes.append("a hub model that is not in the local cache; its sizes are known when it is loaded")
            return plan
        plan.model = str(location.path)
        _Sizing(config, registry, worker, location).describe(plan)
    except MemoryError as error:
        raise too_large(error) from error
    return plan


def _worker(registry: Registry) -> WorkerContextImpl:
    """A worker's side of the start, in which nothing is loaded."""
    context = registry.engine_context
    limits: SchedulerLimits = context.get("scheduler").limits
    context.prepare_workers(max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens)
    return context.worker_context()


def _settle_device(config: EngineConfig, registry: Registry, worker: WorkerContextImpl) -> None:
    """Have the runner say what ``auto`` is."""
    limits: SchedulerLimits = registry.engine_context.get("scheduler").limits
    runner: Runner = worker.get("runner")
    if runner.estimate(ModelInfo(0, 0), 0, limits.max_num_batched_tokens) is None:
        worker.device = "cpu" if config.device == "auto" else config.device


@dataclass(frozen=True, slots=True)
class _Case:
    """Settings that decide about memory; None: as configured."""

    max_model_len: int | None
    budget: int  #: max_num_batched_tokens
    memory: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a cache made of a case."""

    cache: Cache
    layout: KVLayout
    max_model_len: int
    total: int


class _Sizing:
    """The negotiation of a start, without loading anything, for any settings."""

    def __init__(
        self, config: EngineConfig, registry: Registry, worker: WorkerContextImpl, location: ModelLocation
    ) -> None:
        self._config, self._registry, self._worker = config, registry, worker
        context = registry.engine_context
        self._limits: SchedulerLimits = context.get("scheduler").limits
        self._executor: Executor = context.get("executor")
        self._runner: Runner = self._worker.get("runner")
        _settle_device(config, registry, worker)
        self._files: ModelFiles = read_model(location, config.dtype, self._worker.device, config.max_model_len)
        self._estimates: dict[int, MemoryEstimate | None] = {}
        (self._choice,) = registry.selection("cache").choices

    def describe(self, plan: MemoryPlan) -> None:
        """Fill in everything that is known."""
        files = self._files
        plan.dtype, plan.device = files.dtype, self._worker.device
        plan.notes += files.notes
        self._plan_weights(plan)
        plan.tiers = [_tier(choice) for choice in self._registry.selection("cache_tier").choices]
        self._host_bytes = sum(tier.host_memory or 0 for tier in plan.tiers)
        case = _Case(self._config.max_model_len, self._limits.max_num_batched_tokens)
        estimate = self._estimate(case.budget)
        if estimate is not None:
            plan.workspace, plan.free = estimate.workspace_bytes, estimate.free_bytes
        if files.layers is None or files.max_model_len is None:
            plan.notes.append("the KV cache of this architecture is known when the model is loaded")
            return
        if self._registry.selection("drafter").choices:
            plan.notes.append("layers of drafters are not counted; they are known when those are loaded")
        limit = self._config.max_model_len or files.max_model_len
        self._specs = files.specs(min(limit, files.max_model_len))
        self._support = tuple(self._worker.get("attention").support(spec) for spec in self._specs)
        plan.kv_dtype, plan.kv_bytes_per_token = files.dtype, sum(spec.bytes_per_token for spec in self._specs)
        for spec, support in zip(self._specs, self._support, strict=True):
            if support.problem:
                plan.problems.append(
                    f"the selected attention plugin cannot serve layer {spec.layer} ({spec.kind}): {support.problem}"
                )
                return
        if limit > files.max_model_len:
            plan.problems.append(
                f"max_model_len: {limit} exceeds the {files.max_model_len} positions of the model; lower it"
            )
            return
        cache: Cache = self._registry.engine_context.get("cache")
        try:
            outcome = self._try(case, cache)
        except CacheMemoryError as error:
            if estimate is None and not self._is_sized:
                plan.max_model_len = limit
                plan.notes.append("the KV cache takes what is left after loading; set plugins.cache.memory for a size")
            else:
                plan.problems.append(f"{error}{self._advice(case, short=True)}")
            return
        _describe(plan, outcome)
        self._check_tiers(plan, outcome.layout)
        if outcome.max_model_len < limit:
            plan.notes.append(f"max_model_len is lowered from {limit}, which the KV cache cannot hold")
        if not self._is_sized:
            plan.notes.append(
                "the KV cache has no size of its own and takes a share of what is free at the start, here of what is "
                "free now; set plugins.cache.memory for a fixed size"
            )
        if estimate is not None:
            plan.total = outcome.total
            if outcome.total > estimate.free_bytes:
                plan.problems.append(
                    f"{format_size(outcome.total)} are needed and {format_size(estimate.free_bytes)} are free on "
                    f"{estimate.device}.{self._advice(case, short=False)}"
                )

    def _plan_weights(self, plan: MemoryPlan) -> None:
        """What the model says its weights will take, else what its files hold."""
        files = self._files
        planned: int | None = self._worker.get("model").plan_weights()
        quantization = next((choice.offer.name for choice in self._registry.selection("quantization").choices), None)
        if planned is not None:
            files.weights_in_memory, plan.quantization = planned, quantization
        elif quantization is not None and files.weights_in_memory is not None:
            plan.notes.append(
                f"weights are counted as {files.dtype}; what {quantization} makes of them is known after loading only"
            )
        plan.weights_on_disk, plan.weights_in_memory = files.weights_on_disk, files.weights_in_memory

    def _check_tiers(self, plan: MemoryPlan, layout: KVLayout) -> None:
        context = self._registry.engine_context
        for tier in context.all("cache_tier"):
            try:
                tier.check(context, layout)
            except TrivetError as error:
                plan.problems.append(str(error))
                return

    # ------------------------------------------------------------------ any settings

    def _estimate(self, budget: int) -> MemoryEstimate | None:
        """Asked once per budget: what is free changes from one moment to the next."""
        if budget not in self._estimates:
            weights = self._files.weights_in_memory or 0
            self._estimates[budget] = self._runner.estimate(self._files.info, weights, budget)
        return self._estimates[budget]

    def _try(self, case: _Case, cache: Cache) -> _Outcome:
        """What ``cache`` would allocate. Raises CacheMemoryError when it has no room for a request."""
        estimate = self._estimate(case.budget)
        available = 0 if estimate is None else estimate.available_bytes
        executor = self._executor
        depth = executor.max_in_flight if executor.token_feedback else 1

        def configure(length: int) -> KVLayout:
            seqs = self._limits.max_num_seqs
            return cache.configure(
                CacheRequirements(self._specs, self._support, available, length, seqs, depth * case.budget)
            )

        length = case.max_model_len or self._files.max_model_len or 0
        try:
            layout = configure(length)
        except CacheMemoryError as error:
            if case.max_model_len is not None or not error.fits_tokens:
                raise
            length = error.fits_tokens
            layout = configure(length)
        workspace = 0 if estimate is None else estimate.workspace_bytes
        host = self._host_bytes if estimate is not None and estimate.device == "cpu" else 0
        total = (self._files.weights_in_memory or 0) + workspace + layout.num_bytes + host
        return _Outcome(cache, layout, length, total)

    def _attempt(self, case: _Case) -> _Outcome | None:
        """As :meth:`_try` with a cache of its own; None when it does not fit."""
        options = self._options
        if case.memory is not None:
            options |= {"memory": case.memory, "num_blocks": None}
        if case.dtype is not None:
            options["dtype"] = case.dtype
        cache = self._registry.engine_context.build("cache", self._choice.offer.name, **options)
        try:
            outcome = self._try(case, cache)
        except CacheMemoryError:
            return None
        finally:
            cache.shutdown()
        estimate = self._estimate(case.budget)
        return outcome if estimate is None or outcome.total <= estimate.free_bytes else None

    @property
    def _options(self) -> dict[str, Any]:
        return {} if self._choice.model is None else self._choice.model.model_dump()

    @property
    def _is_sized(self) -> bool:
        """Whether the options of the cache say how large it is; a cache without such options knows by itself."""
        sizes = [self._options[name] for name in ("memory", "num_blocks") if name in self._options]
        return not sizes or any(size is not None for size in sizes)

    # ------------------------------------------------------------------ what would help

    def _advice(self, case: _Case, *, short: bool) -> str:
        """The settings any one of which would make it fit, each tried out.

        Args:
            case: What does not fit.
            short: Whether the cache has refused, which names the length and the memory that would do.
        """
        found = [
            *self._tiers(case),
            *self._memories(case, short=short),
            *self._types(case),
            *self._budgets(case),
        ]
        if found:
            return f" {'What would fit too' if short else 'What would fit'}: {'; or '.join(found)}."
        if short:
            return ""
        narrower = "dtype: bfloat16, " if self._files.dtype == "float32" else ""
        return f" No setting of the KV cache makes it fit: choose {narrower}a smaller model or a larger device."

    def _tiers(self, case: _Case) -> Iterator[str]:
        """Less host memory for the cache tiers."""
        estimate, host = self._estimate(case.budget), self._host_bytes
        if not host or estimate is None or estimate.device != "cpu":
            return
        self._host_bytes = 0
        try:
            outcome = self._attempt(case)
        finally:
            self._host_bytes = host
        if outcome is not None and estimate.free_bytes > outcome.total:
            room = format_size(estimate.free_bytes - outcome.total).removeprefix("~")
            yield f"host_memory of at most {room} for the tiers of plugins.cache_tier"

    def _memories(self, case: _Case, *, short: bool) -> Iterator[str]:
        """A size of the cache: from what a request of the full length needs to what is free. If that is too little,
        what is free and the length that it holds."""
        room = self._room(case)
        if "memory" not in self._options or room <= 0:
            return
        most = format_size(room).removeprefix("~")
        outcome = self._attempt(replace(case, memory=room))
        if outcome is None:
            shorter = self._attempt(replace(case, memory=room, max_model_len=None))
            if shorter is not None:
                yield f"plugins.cache.memory: {most}, all that is free, with max_model_len: {shorter.max_model_len}"
        elif not short:
            blocks = outcome.cache.request_blocks(outcome.max_model_len) or 0
            least = outcome.layout.num_bytes // outcome.layout.storage[0].num_blocks * (1 + blocks)
            yield f"plugins.cache.memory from {format_bytes(least)} to {most}"

    def _types(self, case: _Case) -> Iterator[str]:
        """A narrower type of keys and values."""
        width = {"float32": 4}.get(self._files.dtype, 2)
        for dtype in _NARROW:
            narrower = (1 if dtype.startswith("fp8") else 2) < width
            if narrower and "dtype" in self._options and all(dtype in one.dtypes for one in self._support):
                if self._attempt(replace(case, dtype=dtype)):
                    yield f"plugins.cache.dtype: {dtype}"
                return

    def _budgets(self, case: _Case) -> Iterator[str]:
        """A smaller step, which takes less workspace and, in layers with a window, fewer blocks."""
        for budget in _BUDGETS:
            if budget < case.budget and self._attempt(replace(case, budget=budget)):
                yield f"max_num_batched_tokens of {budget} or less"
                return

    def _room(self, case: _Case) -> int:
        """Bytes that a cache may have beside everything else."""
        estimate = self._estimate(case.budget)
        if estimate is None:
            return 0
        host = self._host_bytes if estimate.device == "cpu" else 0
        return estimate.free_bytes - estimate.workspace_bytes - (self._files.weights_in_memory or 0) - host


def _describe(plan: MemoryPlan, outcome: _Outcome) -> None:
    layout, cache = outcome.layout, outcome.cache
    plan.max_model_len, plan.cache_bytes = outcome.max_model_len, layout.num_bytes
    plan.num_blocks = layout.storage[0].num_blocks - 1 if layout.storage else 0  # without the null block
    plan.groups = [GroupPlan(len(g.layers), g.kind, g.window, g.block_size) for g in layout.groups]
    plan.kv_bytes_per_token = sum(spec.bytes_per_token for spec in layout.specs)
    plan.kv_dtype = layout.specs[0].dtype if layout.specs else plan.kv_dtype
    per_group = [-(-outcome.max_model_len // group.block_size) for group in layout.groups]
    blocks = cache.request_blocks(outcome.max_model_len)
    if blocks is None and len(per_group) == 1:
        (blocks,) = per_group
    if not blocks:
        return
    plan.num_full_requests = plan.num_blocks // blocks
    plan.kv_bytes_per_request = blocks * layout.num_bytes // layout.storage[0].num_blocks
    if [blocks] == per_group:
        plan.num_tokens = plan.num_blocks * layout.groups[0].block_size
    else:
        plan.num_tokens = plan.num_full_requests * outcome.max_model_len


def _tier(choice: Choice) -> TierPlan:
    options = {} if choice.model is None else choice.model.model_dump()
    on_disk = "path" not in options or options["path"] is not None
    return TierPlan(choice.offer.name, options.get("host_memory"), options.get("disk_memory") if on_disk else None)
