"""What ``trivet config check`` reads from a model's files is what the loaded model then says of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from worker_kit import FAMILIES, Context, make_model, save_model

from trivet.gguf import GGUFFile
from trivet.launcher._model_files import read_model
from trivet.model_source import resolve_model
from trivet_torch.weights.gguf_config import config_from_gguf
from trivet_transformers.model import TransformersModel


def loaded(name: str, max_model_len: int | None) -> TransformersModel:
    model = TransformersModel(Context(name, max_model_len=max_model_len))
    model.info = model.load()  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("max_model_len", [None, 8])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("mistral", {"sliding_window": 300}),
    ],
    ids=str,
)
def test_a_folder(family: str, changes: dict[str, Any], max_model_len: int | None, tmp_path: Path) -> None:
    name = save_model(make_model(family, **changes), tmp_path)
    model = loaded(name, max_model_len)
    files = read_model(resolve_model(name), "float32", "cpu")
    info = model.info  # type: ignore[attr-defined]
    assert list(files.specs(max_model_len or info.max_model_len)) == model.kv_specs()
    assert (files.vocab_size, files.hidden_size, files.max_model_len) == (
        info.vocab_size,
        info.hidden_size,
        info.max_model_len,
    )
    model.shutdown()


LAYERS, HEADS, KV_HEADS, WIDTH = 6, 4, 2, 64


@pytest.mark.parametrize(
    ("arch", "window", "pattern", "head_dim"),
    [
        ("llama", None, None, None),
        ("llama", 32, None, 32),
        ("qwen2", None, None, None),
        ("qwen3", None, None, 32),
        ("phi3", 0, None, None),
        ("phi3", 20, None, None),
        ("gemma2", 16, None, 32),
        ("gemma3", 16, None, 32),
        ("gemma3", 16, 3, 32),
        ("gemma3", 16, [True, False, True, True, False, True], 32),
        ("gemma3", 500, None, 32),
    ],
    ids=str,
)
def test_a_gguf_file(
    arch: str, window: int | None, pattern: int | list[bool] | None, head_dim: int | None, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(80)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if window is not None:
        writer.add_sliding_window(window)
    if isinstance(pattern, int):
        writer.add_uint32(f"{arch}.attention.sliding_window_pattern", pattern)
    elif pattern is not None:
        writer.add_array(f"{arch}.attention.sliding_window_pattern", pattern)
    writer.add_tensor("token_embd.weight", np.zeros((96, WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = config_from_gguf(GGUFFile(tmp_path / "model.gguf"))
    common = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if common else "full_attention"] * LAYERS
    wanted = [common if kind == "sliding_attention" and common < 128 else None for kind in types]
    files = read_model(resolve_model(str(tmp_path / "model.gguf")), "auto", "cpu")
    specs = files.specs(128)
    assert [spec.window for spec in specs] == wanted
    assert [spec.kind for spec in specs] == ["full" if window is None else "sliding" for window in wanted]
    assert {(spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in specs} == {
        (KV_HEADS, head_dim or WIDTH // HEADS, "float32")
    }
    assert (files.vocab_size, files.hidden_size, files.max_model_len) == (96, WIDTH, 128)
    assert files.weights_in_memory == 96 * WIDTH * 4
    assert read_model(resolve_model(str(tmp_path / "model.gguf")), "auto", "cuda").dtype == "bfloat16"
