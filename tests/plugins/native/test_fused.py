"""Layers in compiled code give the bits of the operations one by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native_kit import CASES, LONGEST, make_model, make_native, save
from torch import Tensor

from trivet_kernels.cpu import build, tiles
from trivet_native import loading
from trivet_native.layers import SLICE
from trivet_native.model import NativeModel
from trivet_quantization.int4 import Int4
from trivet_quantization.int8 import Int8
from trivet_quantization.options import Int4Options, Int8Options

needs_tiles = pytest.mark.skipif(not tiles.has_tiles(), reason="without matrix tiles oneDNN multiplies bfloat16")

EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"}
DENSE = [case for case in CASES if case not in EXPERTS]


def load(name: str, **given: Any) -> NativeModel:
    model: NativeModel = make_native(name, **{"dtype": "bfloat16", **given})
    model.load()
    return model


def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """An attention of sorts, that depends on everything it is given."""
    each = query.shape[1] // value.shape[1]
    seen = (query * (key.repeat_interleave(each, 1) + layer)).float().sum(-1, keepdim=True).sigmoid()
    return (seen * value.repeat_interleave(each, 1).float()).to(query.dtype)


def body(model: NativeModel, rows: int) -> list[Tensor]:
    """What the layers give, and what the second one gave."""
    ids = torch.randint(3, 60, (rows,), generator=torch.Generator().manual_seed(rows))
    last, wanted = model._decoder.body(ids, torch.arange(rows) % LONGEST, attend, (1,))
    return [last, wanted[1]]


def has_native_layers(model: NativeModel) -> bool:
    return all(block._native is not None for block in model._decoder._blocks)


def check(name: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    """Compare the layers in compiled code with the same ones without it."""
    fused = load(name, **given)
    assert has_native_layers(fused)
    got = {rows: body(fused, rows) for rows in (1, 5, 40, SLICE + 40, 5)}
    monkeypatch.setattr(loading, "fused_block", lambda *_: None)
    plain = load(name, **given)
    assert not has_native_layers(plain)
    for rows, tensors in got.items():
        for mine, others in zip(tensors, body(plain, rows), strict=True):
            assert torch.equal(mine, others), f"{rows} rows"


@needs_tiles
@pytest.mark.parametrize("case", DENSE)
def test_all_families(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(save(make_model(case, intermediate_size=96), tmp_path), monkeypatch)


@pytest.mark.skipif(build.library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("case", ["llama biases, tied", "gemma3", "phi3"])
def test_quantised_weights(case: str, kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(make_model(case, intermediate_size=96), tmp_path)
    context: Any = SimpleNamespace(device="cpu", config=SimpleNamespace(dtype=dtype, model="fake", revision=None))
    provider, options = (Int8, Int8Options()) if kind == "int8" else (Int4, Int4Options())
    check(name, monkeypatch, dtype=dtype, quantization=provider(context, options))


@needs_tiles
def test_a_position_beyond_the_table_is_refused(tmp_path: Path) -> None:
    model = load(save(make_model("llama", intermediate_size=96), tmp_path))
    ids = torch.tensor([4, 5])
    with pytest.raises(IndexError, match=rf"positions must be in \[0, {LONGEST}\), .* not 1 to {LONGEST}"):
        model._decoder.body(ids, torch.tensor([1, LONGEST]), attend)


@needs_tiles
def test_attention_may_answer_in_any_layout_and_type(tmp_path: Path) -> None:
    model = load(save(make_model("llama", intermediate_size=96), tmp_path))

    def strided(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = attend(layer, query, key, value).float()
        return out.transpose(0, 1).contiguous().transpose(0, 1)

    ids, positions = torch.arange(4, 11), torch.arange(7)
    expected = model._decoder.body(ids, positions, attend)[0].clone()
    assert torch.equal(model._decoder.body(ids, positions, strided)[0], expected)


@pytest.mark.parametrize("case", ["mixtral", "llama"])
def test_what_native_code_cannot_call_stays_in_python(case: str, tmp_path: Path) -> None:
    """Experts, and halves of a gate that are no whole panels."""
    assert not has_native_layers(load(save(make_model(case, intermediate_size=40), tmp_path)))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_serve_float16(kind: str, tmp_path: Path) -> None:
    name = save(make_model("llama", intermediate_size=96), tmp_path)
    results = {}
    for dtype in ("float16", "float32"):
        context: Any = SimpleNamespace(device="cpu", config=SimpleNamespace(dtype=dtype, model="fake", revision=None))
        provider, options = (Int8, Int8Options()) if kind == "int8" else (Int4, Int4Options())
        results[dtype] = body(load(name, dtype=dtype, quantization=provider(context, options)), 9)[0].float()
    scale = float(results["float32"].abs().max())
    torch.testing.assert_close(results["float16"], results["float32"], rtol=0.0, atol=0.1 * scale)


def test_float32_without_quantization_is_left_to_the_library(tmp_path: Path) -> None:
    model: Any = make_native(save(make_model("llama", intermediate_size=96), tmp_path))
    model.load()
    assert not has_native_layers(model)


@pytest.mark.skipif(build.library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("kind", [pytest.param("none", marks=needs_tiles), "int8", "int4"])
def test_the_head_gives_the_same_logits_in_compiled_code(kind: str, tmp_path: Path) -> None:
    name = save(make_model("gemma2", intermediate_size=96), tmp_path)
    context: Any = SimpleNamespace(device="cpu", config=SimpleNamespace(dtype="bfloat16", model="fake", revision=None))
    quantization = {"none": None, "int8": Int8(context, Int8Options()), "int4": Int4(context, Int4Options())}[kind]
    decoder = load(name, **({} if quantization is None else {"quantization": quantization}))._decoder
    native, decoder._native_head = decoder._native_head, None
    assert native is not None
    most = native._most
    for rows in (1, 3, most, most + 1):
        hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)).bfloat16()
        decoder._native_head = None
        expected = decoder.logits(hidden)
        decoder._native_head = native
        first = decoder.logits(hidden)
        assert torch.equal(first, expected)
        # Whoever keeps logits keeps their numbers.
        decoder.logits(torch.zeros_like(hidden))
        decoder.release()
        assert torch.equal(first, expected)


def test_the_last_sum_and_its_norm_are_the_same_in_one_go(tmp_path: Path) -> None:
    decoder = load(save(make_model("llama"), tmp_path))._decoder
    generator = torch.Generator().manual_seed(3)
    residual, delta = (torch.randn(7, 32, generator=generator).bfloat16() for _ in range(2))
    expected = decoder.final_norm(residual + delta)
    assert torch.equal(decoder.final_norm(residual, delta), expected)
