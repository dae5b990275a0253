"""What layers keep, as config.json tells it: the windows that transformers' configuration classes come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from trivet.errors import ModelLoadError
from trivet.launcher._model_files import Layer, folder_layers, read_model
from trivet.model_source import ModelLocation

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gemma", {}),
    ("granite", {}),
    ("gpt_neox", {}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 64}),
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 64}),
    ("ministral", {"sliding_window": 64}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 2047}),
    ("phimoe", {"sliding_window": 64}),
    ("starcoder2", {"sliding_window": 64}),
    ("qwen2", {}),
    ("qwen2", {"sliding_window": 64, "max_window_layers": 3}),
    ("qwen2", {"sliding_window": 64, "max_window_layers": 3, "use_sliding_window": True}),
    ("qwen3", {"sliding_window": 64, "max_window_layers": 3, "use_sliding_window": True}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 64}),
    ("qwen2_moe", {}),
    ("qwen2_moe", {"sliding_window": 64, "max_window_layers": 5, "use_sliding_window": True}),
    ("qwen3_moe", {"sliding_window": 64}),
    ("qwen3_moe", {"sliding_window": 64, "use_sliding_window": True}),
    ("gemma2", {}),
    ("gemma2", {"sliding_window": 64}),
    ("gemma3_text", {}),
    ("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 3}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": ["full_attention"] + ["sliding_attention"] * 7}),
    ("cohere2", {}),
    ("cohere2", {"sliding_window": 64, "sliding_window_pattern": 2}),
    ("exaone4", {"sliding_window": 64}),
    ("olmo3", {"sliding_window": 64}),
    ("gpt_oss", {}),
    ("smollm3", {}),
    ("llama4_text", {}),
    ("llama4_text", {"attention_chunk_size": 64, "no_rope_layers": [1, 0] * 4}),
    ("llama4_text", {"attention_chunk_size": None}),
]
SIZES = {"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4}


def layers_of(config: Any) -> tuple[Layer, ...]:
    """By transformers' own reading: the types decide, and without them every layer has the window."""
    window = getattr(config, "sliding_window", None) or None
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 8
    kinds: dict[str, Layer] = {
        "full_attention": ("full", None),
        "sliding_attention": ("sliding", window) if window else ("full", None),
        "chunked_attention": ("chunked", chunk),
    }
    return tuple(kinds[name] for name in types)


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES, ids=str)
def test_windows_are_those_of_the_configuration_class(model_type: str, changes: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **changes)
    bare = {"model_type": model_type, **SIZES, **changes}
    assert folder_layers(bare, 8) == layers_of(config)


@pytest.mark.parametrize(("model_type", "changes"), FAMILIES, ids=str)
def test_saved_configurations_come_to_the_same(model_type: str, changes: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **changes)
    assert folder_layers(config.to_dict(), 8) == layers_of(config)


@pytest.mark.parametrize(
    "text",
    [
        {"layer_types": ["linear_attention"] * 8},
        {"layer_types": ["full_attention"] * 7},
        {"model_type": "unheard_of", "sliding_window": 64},
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
    ],
    ids=str,
)
def test_what_is_not_said_is_not_guessed(text: dict[str, Any]) -> None:
    assert folder_layers(text, 8) is None


def test_a_configuration_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read as JSON"):
        read_model(ModelLocation("hf", tmp_path), "auto", "cpu")


@pytest.mark.parametrize(
    ("rope", "given", "expected"),
    [
        ({"type": "su", "short_factor": [1.0], "long_factor": [2.0]}, None, 512),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, None, 512),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 100, 4096),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 513, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, None, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 4097, 16384),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, None, 4096),
        ({}, None, 4096),
    ],
)
def test_the_context_is_that_of_the_rotary_embedding(
    tmp_path: Path, rope: dict[str, Any], given: int | None, expected: int
) -> None:
    values = {
        "model_type": "phi3", "max_position_embeddings": 4096, "original_max_position_embeddings": 512,
        "vocab_size": 8, "rope_scaling": rope or None, **SIZES,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_model(ModelLocation("hf", tmp_path), "auto", "cpu", given).max_model_len == expected
