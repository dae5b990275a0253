"""What ``trivet config check`` reads from a model's files is what the loaded model then says of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worker_kit import FAMILIES, Context, make_model, save_model

from trivet.launcher._model_files import read_model
from trivet.model_source import resolve_model
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
