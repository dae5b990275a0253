"""The roles: what a provider of each kind must do.

A provider is a class of one of these abstract bases. Constructors are not part of a role's interface: the registry
calls the factory of a :class:`trivet.registry.Provider` as ``factory(context, options)``, and an embedder may build
an object any way and hand it to ``Engine(config, plugins=[...])``; either way the engine then calls the role's
``bind``/``configure``/``load``."""

from trivet.roles.attention import Attention, AttentionExtras, AttentionMetadata
from trivet.roles.base import CARDINALITY, ROLE_SIDES, Cardinality, Role, Side
from trivet.roles.cache import Allocation, Cache, CacheHit, CacheRequirements, CacheStats
from trivet.roles.cache_tier import CacheTier, TierLoad, TierStats, TierStore
from trivet.roles.connector import Connector, ExternalHit, TransferReport, TransferWorker
from trivet.roles.drafter import Drafter, DraftInputs, Drafts
from trivet.roles.executor import Executor, PendingStep
from trivet.roles.frontend import EngineClient, Frontend
from trivet.roles.grammar import Grammar, Matcher
from trivet.roles.kv import AttentionSupport, KVGroup, KVLayout, KVStorage, LayerKVSpec
from trivet.roles.logits_processor import LogitsProcessor
from trivet.roles.model import ForwardBatch, ForwardOutput, Model, ModelInfo
from trivet.roles.quantization import Quantization, StoredLinear
from trivet.roles.runner import MemoryEstimate, Runner, WorkerInfo
from trivet.roles.sampler import Sampled, Sampler, SampleRows
from trivet.roles.scheduler import ScheduleInputs, Scheduler, SchedulerLimits, StepWaits, Wait, WaitSpan
from trivet.roles.tokenizer import Detokenizer, Tokenizer

ROLE_CLASSES: dict[str, type[Role]] = {
    cls.role: cls
    for cls in (
        Scheduler,
        Cache,
        CacheTier,
        Executor,
        Runner,
        Model,
        Attention,
        Quantization,
        Sampler,
        LogitsProcessor,
        Grammar,
        Drafter,
        Connector,
        Tokenizer,
        Frontend,
    )
}

__all__ = [
    "CARDINALITY",
    "ROLE_CLASSES",
    "ROLE_SIDES",
    "Allocation",
    "Attention",
    "AttentionExtras",
    "AttentionMetadata",
    "AttentionSupport",
    "Cache",
    "CacheHit",
    "CacheRequirements",
    "CacheStats",
    "CacheTier",
    "Cardinality",
    "Connector",
    "Detokenizer",
    "DraftInputs",
    "Drafter",
    "Drafts",
    "EngineClient",
    "Executor",
    "ExternalHit",
    "ForwardBatch",
    "ForwardOutput",
    "Frontend",
    "Grammar",
    "KVGroup",
    "KVLayout",
    "KVStorage",
    "LayerKVSpec",
    "LogitsProcessor",
    "Matcher",
    "MemoryEstimate",
    "Model",
    "ModelInfo",
    "PendingStep",
    "Quantization",
    "Role",
    "Runner",
    "SampleRows",
    "Sampled",
    "Sampler",
    "ScheduleInputs",
    "Scheduler",
    "SchedulerLimits",
    "Side",
    "StepWaits",
    "StoredLinear",
    "TierLoad",
    "TierStats",
    "TierStore",
    "Tokenizer",
    "TransferReport",
    "TransferWorker",
    "Wait",
    "WaitSpan",
    "WorkerInfo",
]
