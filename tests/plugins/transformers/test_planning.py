"""What a configuration's weights will take, told from headers, is what the loaded model says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_gguf_models import MODELS, write_gguf
from test_gguf_models import make_model as make_network
from worker_kit import FAMILIES, Context, make_model, save_model

from trivet_torch.weights import load_causal_lm
from trivet_transformers.model import TransformersModel


def transformers_model(name: str, dtype: str = "float32") -> TransformersModel:
    context: Any = Context(name)
    context.config.dtype = dtype
    return TransformersModel(context)


def compare(name: str, dtype: str = "float32") -> int:
    """The plan, which is made first; compared with what is there when the model is loaded."""
    model = transformers_model(name, dtype)
    planned = model.plan_weights()
    model.load()
    assert planned == model.weight_bytes
    model.shutdown()
    return planned


def planned_with(name: str, **fields: Any) -> int | None:
    """The plan with other fields in its config.json, which is then as it was."""
    path = Path(name) / "config.json"
    before = path.read_text(encoding="utf-8")
    path.write_text(json.dumps(json.loads(before) | fields), encoding="utf-8")
    try:
        return transformers_model(name).plan_weights()
    finally:
        path.write_text(before, encoding="utf-8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, dtype: str, tmp_path: Path) -> None:
    compare(save_model(make_model(family), tmp_path), dtype)


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    tied, untied = (
        compare(save_model(make_model("qwen2", tie_word_embeddings=tied), tmp_path / str(tied)))
        for tied in (True, False)
    )
    assert untied - tied == 4 * 97 * 32


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3moe", "gemma3"])
def test_gguf_files(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_network(name), MODELS[name][0])
    compare(str(path), "bfloat16")


def test_tensors_that_the_model_has_no_use_for_are_not_counted(tmp_path: Path) -> None:
    name = save_model(make_model("llama"), tmp_path)
    before = compare(name)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(48, 32)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert compare(name) == before


def test_parameters_that_stay_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    name = save_model(make_model("llama"), tmp_path)
    plain = compare(name, "bfloat16")
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["layers.*.input_layernorm"])
    model, _ = load_causal_lm(name, dtype=torch.bfloat16, attn_implementation="sdpa")
    assert transformers_model(name, "bfloat16").plan_weights() == plain + 2 * 3 * 32
    assert sum(t.nbytes for t in (*model.parameters(), *model.buffers())) == plain + 2 * 3 * 32


def test_what_headers_do_not_tell(tmp_path: Path) -> None:
    name = save_model(make_model("llama"), tmp_path)
    assert planned_with(name) is not None
    assert planned_with(name, tie_word_embeddings=True) is None, "tied only if both matrices are the same"
    assert planned_with(name, auto_map={"AutoConfig": "mine.Config"}) is None, "code of its own"
    assert planned_with(name, quantization_config={"quant_method": "gptq", "bits": 4}) is None, "quantised in the file"
    (tmp_path / "model.safetensors").unlink()
    assert transformers_model(name).plan_weights() is None, "not there yet"
    assert transformers_model("nobody-of-this-name/model").plan_weights() is None, "not downloaded"
