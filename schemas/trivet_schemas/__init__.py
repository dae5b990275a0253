"""Configuration, sampling parameters, requests and outputs as pydantic models.

Names load when they are first used, so that ``import trivet_schemas`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet_schemas.batch_io import BatchLine as BatchLine
    from trivet_schemas.batch_io import parse_batch_lines as parse_batch_lines
    from trivet_schemas.config import EngineConfig as EngineConfig
    from trivet_schemas.config import GenerateSection as GenerateSection
    from trivet_schemas.config import PluginSelection as PluginSelection
    from trivet_schemas.errors import ConfigError as ConfigError
    from trivet_schemas.errors import ParameterError as ParameterError
    from trivet_schemas.errors import Problem as Problem
    from trivet_schemas.errors import SchemaError as SchemaError
    from trivet_schemas.options import Options as Options
    from trivet_schemas.options import Size as Size
    from trivet_schemas.options import collect_flat_names as collect_flat_names
    from trivet_schemas.options import flat as flat
    from trivet_schemas.options import format_size as format_size
    from trivet_schemas.options import parse_size as parse_size
    from trivet_schemas.outputs import BeamSearchOutput as BeamSearchOutput
    from trivet_schemas.outputs import BeamSearchSequence as BeamSearchSequence
    from trivet_schemas.outputs import ClassificationOutput as ClassificationOutput
    from trivet_schemas.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from trivet_schemas.outputs import CompletionOutput as CompletionOutput
    from trivet_schemas.outputs import EmbeddingOutput as EmbeddingOutput
    from trivet_schemas.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from trivet_schemas.outputs import Logprob as Logprob
    from trivet_schemas.outputs import PoolingOutput as PoolingOutput
    from trivet_schemas.outputs import PoolingRequestOutput as PoolingRequestOutput
    from trivet_schemas.outputs import RequestMetrics as RequestMetrics
    from trivet_schemas.outputs import RequestOutput as RequestOutput
    from trivet_schemas.outputs import ScoringOutput as ScoringOutput
    from trivet_schemas.outputs import ScoringRequestOutput as ScoringRequestOutput
    from trivet_schemas.prompts import ParsedPrompt as ParsedPrompt
    from trivet_schemas.prompts import PromptType as PromptType
    from trivet_schemas.prompts import TextPrompt as TextPrompt
    from trivet_schemas.prompts import TokensPrompt as TokensPrompt
    from trivet_schemas.prompts import parse_prompt as parse_prompt
    from trivet_schemas.sampling import ENGINE_FIELDS as ENGINE_FIELDS
    from trivet_schemas.sampling import BeamSearchParams as BeamSearchParams
    from trivet_schemas.sampling import PoolingParams as PoolingParams
    from trivet_schemas.sampling import RequestOutputKind as RequestOutputKind
    from trivet_schemas.sampling import SamplingParams as SamplingParams
    from trivet_schemas.schema import engine_json_schema as engine_json_schema
    from trivet_schemas.structured import StructuredOutputsParams as StructuredOutputsParams
    from trivet_schemas.validation import format_validation_error as format_validation_error
    from trivet_schemas.validation import validate_options as validate_options
    from trivet_schemas.yaml_io import load_config_file as load_config_file

_MODULES = {
    "batch_io": "BatchLine parse_batch_lines",
    "config": "EngineConfig GenerateSection PluginSelection",
    "errors": "ConfigError ParameterError Problem SchemaError",
    "options": "Options Size collect_flat_names flat format_size parse_size",
    "outputs": "BeamSearchOutput BeamSearchSequence ClassificationOutput ClassificationRequestOutput CompletionOutput "
    "EmbeddingOutput EmbeddingRequestOutput Logprob PoolingOutput PoolingRequestOutput RequestMetrics RequestOutput "
    "ScoringOutput ScoringRequestOutput",
    "prompts": "ParsedPrompt PromptType TextPrompt TokensPrompt parse_prompt",
    "sampling": "ENGINE_FIELDS BeamSearchParams PoolingParams RequestOutputKind SamplingParams",
    "schema": "engine_json_schema",
    "structured": "StructuredOutputsParams",
    "validation": "format_validation_error validate_options",
    "yaml_io": "load_config_file",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605  a list of strings, made from the table above


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
