"""Models that cannot be served are refused when they are loaded, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from worker_kit import VOCAB, Context, all_logits, greedy, make_model, make_runner, save_model

from trivet.errors import ModelLoadError
from trivet_transformers.model import TransformersModel

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "both directions": ("BertConfig", {}, "attends in both directions"),
    "linear attention": (
        "MiniMaxConfig",
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16},
        "layers of type linear_attention",
    ),
    "alibi": ("BloomConfig", {"n_layer": 2, "n_head": 4}, "does not use transformers' attention interface"),
    "recurrent": ("MambaConfig", {"state_size": 4}, "does not use transformers' attention interface"),
    "two calls per layer": ("DiffLlamaConfig", {"head_dim": 16}, "4 of its 2 layers call attention"),
    "a mask of its own": ("DogeConfig", {"head_dim": 16}, "passes attention_mask to attention"),
    "keywords stop": ("NemotronConfig", {}, "does not hand keywords down"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_decoder_is_refused(tmp_path: Path, case: str) -> None:
    import transformers

    name, changes, reason = REFUSED[case]
    config_class = getattr(transformers, name)
    known = set(config_class().to_dict()) | set(config_class.attribute_map or {})
    config = config_class(**{k: v for k, v in SMALL.items() if k in known}, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    context = Context(save_model(model, tmp_path))
    with pytest.raises(ModelLoadError, match=f"cannot run {type(model).__name__}: .*{reason}"):
        TransformersModel(context).load()


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    with pytest.raises(ModelLoadError):
        TransformersModel(Context(save_model(model, tmp_path))).load()


ROPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, 256),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.5, 3.0, 4.0],
                "original_max_position_embeddings": 32,
            },
        },
        32,
    ),
}


def test_a_model_whose_own_code_changes_its_rope_is_refused_beyond_the_length_where_it_does(tmp_path: Path) -> None:
    """Phi-3.5-MoE has factors of its cosines for short and for long batches."""
    import transformers

    config = transformers.PhimoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2, max_position_embeddings=256,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters=ROPES["longrope"][1]["rope_parameters"] | {"short_mscale": 1.0, "long_mscale": 1.2},
    )  # fmt: skip
    name = save_model(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    for length in (33, 256):
        with pytest.raises(ModelLoadError, match="longrope.*set max_model_len to at most 32"):
            make_runner(name, 4, max_model_len=length)
    assert make_runner(name, 4, max_model_len=32).info.model.max_model_len == 256  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_with_constant_frequencies_equals_transformers_up_to_its_end(tmp_path: Path, kind: str) -> None:
    family, changes, limit = ROPES[kind]
    model = make_model(family, **changes)
    driver = make_runner(save_model(model, tmp_path), 8, max_model_len=limit)
    long, short = [3 + (7 * i) % 90 for i in range(limit - 3)], [5, 9, 40]
    driver.add(0, long)
    driver.add(1, short)
    driver.step()
    logits = driver.context.roles["sampler"].logits[-1]
    # The short request must not feel that a long one is in the batch.
    torch.testing.assert_close(logits[1], all_logits(model, short)[-1], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits[0], all_logits(model, long)[-1], atol=1e-5, rtol=0)
    driver.step()
    driver.step()
    assert driver.outputs(1) == greedy(model, short, 3)
    assert driver.outputs(0) == greedy(model, long, 3)
