"""Trivet: a microkernel for LLM inference.

The public names are imported when they are first used, so that ``import trivet`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet._version import __version__

if TYPE_CHECKING:
    from trivet.async_engine import AsyncEngine
    from trivet.context import Context, EngineContext, Hold, WorkerContext
    from trivet.engine import Engine
    from trivet.errors import (
        CacheMemoryError,
        EngineUnhealthyError,
        ModelLoadError,
        OverloadedError,
        PluginError,
        RequestError,
        RequestFault,
        TrivetError,
    )
    from trivet.hookspecs import hookimpl, hookspec
    from trivet.llm import LLM
    from trivet.provider import API_VERSION, Component, Provider, Suitability
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.errors import ConfigError, ParameterError
    from trivet_schemas.options import Options
    from trivet_schemas.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from trivet_schemas.prompts import TextPrompt, TokensPrompt
    from trivet_schemas.sampling import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
    from trivet_schemas.structured import StructuredOutputsParams

__all__ = [
    "API_VERSION",
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CacheMemoryError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Component",
    "ConfigError",
    "Context",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineConfig",
    "EngineContext",
    "EngineUnhealthyError",
    "Hold",
    "Logprob",
    "ModelLoadError",
    "Options",
    "OverloadedError",
    "ParameterError",
    "PluginError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "Provider",
    "RequestError",
    "RequestFault",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "Suitability",
    "TextPrompt",
    "TokensPrompt",
    "TrivetError",
    "WorkerContext",
    "__version__",
    "hookimpl",
    "hookspec",
]

_HOMES = {
    "trivet.async_engine": ("AsyncEngine",),
    "trivet.context": ("Context", "EngineContext", "Hold", "WorkerContext"),
    "trivet.engine": ("Engine",),
    "trivet.errors": (
        "CacheMemoryError", "EngineUnhealthyError", "ModelLoadError", "OverloadedError", "PluginError", "RequestError",
        "RequestFault", "TrivetError",
    ),
    "trivet.hookspecs": ("hookimpl", "hookspec"),
    "trivet.llm": ("LLM",),
    "trivet.provider": ("API_VERSION", "Component", "Provider", "Suitability"),
    "trivet_schemas.config": ("EngineConfig",),
    "trivet_schemas.errors": ("ConfigError", "ParameterError"),
    "trivet_schemas.options": ("Options",),
    "trivet_schemas.outputs": (
        "BeamSearchOutput", "BeamSearchSequence", "ClassificationOutput", "ClassificationRequestOutput",
        "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "Logprob", "PoolingOutput",
        "PoolingRequestOutput", "RequestMetrics", "RequestOutput", "ScoringOutput", "ScoringRequestOutput",
    ),
    "trivet_schemas.prompts": ("TextPrompt", "TokensPrompt"),
    "trivet_schemas.sampling": ("BeamSearchParams", "PoolingParams", "RequestOutputKind", "SamplingParams"),
    "trivet_schemas.structured": ("StructuredOutputsParams",),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
