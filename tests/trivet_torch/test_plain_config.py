"""Configurations that are read without transformers have the values that transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from trivet_torch.weights.plain_config import plain_config

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "eos_token_id": [3, 4],
}
GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": 30.0,
}
LEGACY = {"rope_parameters": None, "rope_theta": 7000.0, "rope_scaling": None}
NESTED = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-full": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 24, **LEGACY},
    "mistral": {"model_type": "mistral", "sliding_window": 100, "hidden_act": "gelu"},
    "mistral-open": {"model_type": "mistral", "sliding_window": None, "head_dim": None, "torch_dtype": "bfloat16"},
    "qwen2": {"model_type": "qwen2", "sliding_window": 128, "max_window_layers": 2},
    "qwen2-legacy": {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 3,
        **LEGACY,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    "gemma2": {"model_type": "gemma2", **GEMMA},
    "gemma3": {"model_type": "gemma3_text", "tie_word_embeddings": True, **GEMMA, **NESTED},
}
DECLINED: dict[str, dict[str, Any]] = {
    "model type": {"model_type": "gpt_neox"},
    "no model type": {"model_type": ["llama"]},
    "unknown field": {"model_type": "llama", "expert_parallel": 3},
    "unknown field of no value": {"model_type": "llama", "expert_parallel": None},
    "quantised": {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
    "another head": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
    "code": {"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}},
    "rope": {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
    "scaled rope": {"model_type": "llama", **LEGACY, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "a text for a size": {"model_type": "llama", "hidden_size": "64"},
    "a flag for a size": {"model_type": "llama", "num_hidden_layers": True},
    "no heads": {"model_type": "llama", "num_attention_heads": 0},
    "heads that do not divide": {"model_type": "llama", "num_attention_heads": 5},
    "a window that is used": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
    "a window of unknown size": {"model_type": "mistral"},
    "too few layer types": {"model_type": "qwen2", "layer_types": ["full_attention"]},
    "both directions": {"model_type": "gemma3_text", **GEMMA, **NESTED, "use_bidirectional_attention": True},
}


def config_json(changes: dict[str, Any]) -> dict[str, Any]:
    values = {**SIZES, **changes}
    if values["rope_parameters"] is None:
        del values["rope_parameters"]
    return values


@pytest.mark.parametrize("case", CASES)
def test_every_field_has_the_value_that_transformers_gives_it(case: str, tmp_path: Path) -> None:
    values = config_json(CASES[case])
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = plain_config(values)
    assert ours is not None
    known = ours.to_dict()
    assert known.keys() >= SIZES.keys()
    for name in known.keys() - {"torch_dtype", "bos_token_id", "pad_token_id", "unk_token_id"}:
        found = getattr(theirs, name)
        assert getattr(ours, name) == (
            str(found).removeprefix("torch.") if isinstance(found, torch.dtype) else found
        ), name


@pytest.mark.parametrize("case", CASES)
def test_what_a_saved_configuration_says_is_understood(case: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(CASES[case])))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    ours = plain_config(saved)
    # Defaults are left out when a configuration is saved; then transformers has to say what they are.
    if ours is not None:
        first = plain_config(config_json(CASES[case]))
        assert first is not None
        common = first.to_dict().keys() & ours.to_dict().keys() - {"bos_token_id", "pad_token_id"}
        assert {name: ours.to_dict()[name] for name in common} == {name: first.to_dict()[name] for name in common}


@pytest.mark.parametrize("case", DECLINED)
def test_what_needs_interpretation_is_left_to_transformers(case: str) -> None:
    assert plain_config(config_json({"model_type": "llama"})) is not None
    assert plain_config(config_json(DECLINED[case])) is None


@pytest.mark.parametrize("name", sorted(SIZES))
def test_a_missing_size_is_left_to_transformers(name: str) -> None:
    values = config_json({"model_type": "llama"})
    del values[name]
    assert plain_config(values) is None


def test_a_field_that_is_not_there_is_named() -> None:
    config = plain_config(config_json({"model_type": "llama"}))
    with pytest.raises(AttributeError, match="no field 'num_experts'"):
        config.num_experts  # noqa: B018
