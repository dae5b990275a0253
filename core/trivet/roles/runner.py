"""Role ``runner``: the worker's side of a step: batch state, input preparation, the phases, the result."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from trivet.plan import StepPlan
from trivet.result import StepResult
from trivet.roles.base import Role
from trivet.roles.kv import AttentionSupport, KVLayout, LayerKVSpec
from trivet.roles.model import ModelInfo


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself after loading; plain data."""

    model: ModelInfo
    specs: tuple[LayerKVSpec, ...]
    support: tuple[AttentionSupport, ...]  #: one per spec
    available_bytes: int  #: memory free for the KV cache
    device: str = "cpu"
    weight_bytes: int = 0
    #: measured bytes of the largest step; None: it was not measured
    workspace_bytes: int | None = None
    #: names of the sampling parameters that the sampler implements; a request that sets another one is refused
    sampling_fields: frozenset[str] = field(default_factory=frozenset)
    draft_tokens: int = 0  #: proposals per step of the drafter, 0 without one
    draft_lookahead: int = 0  #: KV positions that it writes beyond the scheduled tokens
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a runner expects of a worker's memory before anything is loaded, in bytes; plain data."""

    device: str  #: where weights and KV cache will be
    free_bytes: int  #: what weights, workspace and KV cache may take there together, at present
    workspace_bytes: int  #: what the largest step takes
    available_bytes: int  #: what would be left for the KV cache when its options name no size


class Runner(Role):
    """One per worker. Methods are called one at a time, in one thread."""

    role: ClassVar[str] = "runner"

    def estimate(self, model: ModelInfo, weight_bytes: int, max_num_batched_tokens: int) -> MemoryEstimate | None:
        """The memory that a model would meet, for a plan that is made instead of :meth:`load`; None where that is known
        after loading only. Chooses the device, and sets ``context.device``.

        Args:
            model: ``vocab_size``, ``hidden_size`` and ``dtype`` are read.
            weight_bytes: Bytes of its weights in memory.
            max_num_batched_tokens: Tokens of the largest step.
        """
        return None

    @abstractmethod
    def load(self) -> WorkerInfo:
        """Load the model and everything that needs it."""

    @abstractmethod
    def allocate(self, layout: KVLayout) -> None:
        """Allocate KV storage, once, before the first step."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a plan: apply its deltas, forward, sample, draft. Deltas (new, finished, blocks) take effect even
        when a phase then raises. A plan without rows only applies deltas and reports events (compiled grammars, ended
        transfers); it may wait a few milliseconds for one. A :class:`trivet.errors.RequestFault` of a plugin becomes a
        result with ``undone`` set; any other exception leaves this method."""
