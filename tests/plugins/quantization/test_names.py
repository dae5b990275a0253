"""Options held against the layers of the model: what would change nothing is refused, and idle patterns are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from native_kit import make_model, save
from test_gguf_models import MODELS, write_gguf
from test_gguf_models import make_model as make_network
from worker_kit import Context

from trivet.errors import ModelLoadError
from trivet_quantization.gguf import Gguf
from trivet_quantization.int4 import Int4
from trivet_quantization.int8 import Int8
from trivet_quantization.options import GgufOptions, Int4Options, Int8Options

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """Return what saves a small model."""
    return lambda case="llama", **changes: save(make_model(case, num_hidden_layers=1, **changes), tmp_path / case)


def gguf_file(path: Path, blocks: GGMLQuantizationType | None) -> str:
    def quantise(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        for key in [key for key in tensors if key.endswith("ffn_gate.weight")] if blocks is not None else []:
            writer.add_tensor(key, quants.quantize(tensors.pop(key), blocks), raw_dtype=blocks)

    return str(write_gguf(path, make_network("llama"), MODELS["llama"][0], change=quantise))


def test_gguf_refuses_a_folder_which_has_no_blocks(folder: Any) -> None:
    name = folder()
    with pytest.raises(ModelLoadError, match=r"stored as float32.* set plugins\.quantization\.use to int8") as caught:
        Gguf(Context(name), GgufOptions())
    assert str(caught.value).startswith(f"{name}: plugins.quantization would change nothing")


def test_gguf_wants_a_file_with_at_least_one_layer_in_blocks(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"stored as float32, and gguf keeps the blocks"):
        Gguf(Context(gguf_file(tmp_path / "floats.gguf", None)), GgufOptions())
    Gguf(Context(gguf_file(tmp_path / "blocks.gguf", GGMLQuantizationType.Q8_0)), GgufOptions())


def test_patterns_that_leave_out_everything_are_refused(folder: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"its options leave out all 8 layers \(exclude is \['\*'\]\)"):
        Int8(Context(folder()), Int8Options(exclude=("*",)))


def test_patterns_that_fit_no_layer_are_named_with_some_that_there_are(
    folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name = folder()
    Int8(Context(name), Int8Options(exclude=("*.o_proj", "q_proj", "*.fc1")))
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelname == "WARNING"
    assert text.startswith(f"plugins.quantization.exclude: no layer of {name} fits 'q_proj' or '*.fc1'; ")
    assert "o_proj'" not in text
    assert all(layer in text for layer in (LAYER, "model.layers.0.mlp.down_proj", "lm_head"))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_a_layer_and_embeddings_are_none(tied: bool, folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    name = folder(tie_word_embeddings=tied)
    Int8(Context(name), Int8Options(exclude=("lm_head", "*.self_attn.*")))
    assert not caplog.records
    Int8(Context(name), Int8Options(exclude=("model.embed_tokens",)))
    assert "fits 'model.embed_tokens'" in caplog.text


def test_experts_are_layers_one_by_one(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    name = folder("mixtral")
    Int4(Context(name), Int4Options(exclude=("*.experts.3.w2",)))
    assert not caplog.records
    Int4(Context(name), Int4Options(exclude=("*.experts.4.w2",)))
    assert caplog.text.count("experts.0.w") == 3, "one of each kind"


def test_only_patterns_that_somebody_gave_are_held_against_the_model(
    folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    name = folder()
    Int4(Context(name), Int4Options())
    assert not caplog.records, "*.w2, one of the defaults, is of other models"
    Int4(Context(name), Int4Options(eight_bits=("*.w2",)))
    assert "plugins.quantization.eight_bits: no layer" in caplog.text


def test_a_model_that_is_not_here_is_not_judged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for name in ("nobody-of-this-name/model", str(tmp_path), str(tmp_path / "missing")):
        Gguf(Context(name), GgufOptions(exclude=("*.nothing",)))
    assert not caplog.records
