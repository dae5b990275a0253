"""The providers ``int8``, ``int4`` and ``gguf``: what they take, and how close their products are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from quantization_kit import blocks, compare_plan, context, error, floats, stored, tokens

from trivet.errors import ModelLoadError, PluginError
from trivet.testing.suites import Suite
from trivet_kernels.cpu import build
from trivet_kernels.ops import ops_for
from trivet_quantization.blocks import FORMATS
from trivet_quantization.gguf import Gguf
from trivet_quantization.int4 import Int4
from trivet_quantization.int8 import Int8
from trivet_quantization.layers import DequantizingLinear, JoinedLinear, PackedQuantizedLinear
from trivet_quantization.options import GgufOptions, Int4Options, Int8Options


def int8(**options: Any) -> Int8:
    return Int8(context(), Int8Options(**options))


def int4(**options: Any) -> Int4:
    return Int4(context(), Int4Options(**options))


def gguf(**options: Any) -> Gguf:
    return Gguf(context(), GgufOptions(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("quantization", "most"),
    [
        (int8(), 0.011),
        (int8(group=32, activation_group=32), 0.009),
        (int8(group=None, activation_group=None), 0.014),
        (int8(group=None, activation_group=32), 0.012),
        (int8(group=128, activation_group=128), 0.012),
        (int8(activations="int16"), 0.008),
        (int8(group=128, activations="int16"), 0.007),
        (int4(), 0.085),
        (int4(offsets=False), 0.095),
        (int4(activations="int16"), 0.085),
        (int4(eight_bits=["*.up_proj"]), 0.009),
    ],
)
def test_products_are_close(quantization: Int8 | Int4, most: float, dtype: torch.dtype) -> None:
    weight, bias = floats(96, 200).to(dtype), torch.linspace(-1, 1, 96)
    x = tokens(5, 200)
    layer = quantization.linear([stored(weight, bias=bias)])
    assert (layer.in_features, layer.out_features) == (200, 96)
    assert error(layer(x) - bias, x @ weight.float().T) < most


@pytest.mark.parametrize("kind", [kind.name for kind in FORMATS])
@pytest.mark.parametrize("columns", [256, 768])
def test_blocks_are_taken_over(kind: str, columns: int) -> None:
    """Only activations are rounded: to sixteen bits here, so that nothing hides behind that."""
    part, weight = blocks(kind, 40, columns)
    x = tokens(3, columns)
    assert gguf().accepts(part.name, part.shape, kind)
    layer = gguf(activations="int16").linear([part])
    # Scales of the K types are products, rounded to float16.
    assert error(layer(x), x @ weight.T) < (4e-4 if kind.endswith(("_K", "_XS")) else 5e-5)
    assert error(gguf().linear([part])(x), x @ weight.T) < 0.02


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "IQ4_NL"])
def test_int8_takes_blocks_over(kind: str) -> None:
    part, weight = blocks(kind, 40, 256)
    x = tokens(3, 256)
    assert error(int8(group=32, activations="int16").linear([part])(x), x @ weight.T) < 5e-5


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_int4_takes_blocks_over(kind: str) -> None:
    part, weight = blocks(kind, 64, 256)
    x = tokens(3, 256)
    layer = int4(activations="int16").linear([part])
    assert error(layer(x), x @ weight.T) < 4e-4
    assert layer.weight_bytes <= 64 * 256 * 5 / 8


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K", "Q5_1"])
def test_other_blocks_are_rounded_again(kind: str) -> None:
    part, weight = blocks(kind, 40, 256)
    x = tokens(3, 256)
    assert error(int8().linear([part])(x), x @ weight.T) < 0.012
    assert error(int4().linear([part])(x), x @ weight.T) < 0.1


def test_parts_of_a_fused_layer() -> None:
    x = tokens(4, 256)
    query, key = floats(64, 256), floats(20, 256, seed=1)
    bias = torch.arange(64.0)
    layer = int8().linear([stored(query, "q", bias), stored(key, "k"), stored(query, "v", bias)])
    exact = torch.cat([x @ query.T + bias, x @ key.T, x @ query.T + bias], 1)
    assert error(layer(x), exact) < 0.01
    assert isinstance(layer, PackedQuantizedLinear)


@pytest.mark.parametrize("quantization", [int8(), int4()])
def test_a_gate_in_one_go(quantization: Int8 | Int4) -> None:
    """The bits of the operations one after the other, or nothing where it would not be faster."""
    gate, up = floats(96, 128), floats(96, 128, seed=1)
    layer = quantization.linear([stored(gate), stored(up)])
    for rows in (1, 50):
        x = tokens(rows, 128).bfloat16()
        found = layer.gated(x, "silu")
        assert found is not None
        assert found.equal(ops_for(torch.device("cpu")).silu_and_mul(layer(x)))
    narrow = quantization.linear([stored(gate[:40]), stored(up[:40])])
    assert narrow.gated(tokens(3, 128), "silu") is None
    mixed = int4(eight_bits=("*.v_proj",)).linear([stored(gate), stored(up, "model.layers.0.self_attn.v_proj")])
    assert mixed.gated(tokens(3, 128), "silu") is None


def test_parts_of_several_types() -> None:
    x = tokens(4, 256)
    parts, weights = zip(
        *(blocks(kind, out, 256) for kind, out in (("Q4_K", 40), ("Q5_0", 8), ("Q8_0", 33))), strict=True
    )
    layer = gguf(activations="int16").linear(parts)
    assert isinstance(layer, JoinedLinear)
    assert layer.out_features == 81
    assert error(layer(x), torch.cat([x @ weight.T for weight in weights], 1)) < 4e-4
    assert layer.weight_bytes == sum(gguf().linear([part]).weight_bytes for part in (parts[0],)) + (
        gguf().linear(parts[1:]).weight_bytes
    )


def test_more_rows_than_are_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = floats(100, 64)
    x = tokens(4, 64)
    whole = int4().linear([stored(weight)])(x)
    monkeypatch.setattr("trivet_quantization.layers._CHUNK", 7 * 64)
    assert int4().linear([stored(weight)])(x).equal(whole)


@pytest.mark.parametrize("quantization", [int8, int4])
def test_rows_are_let_go_of_once_they_are_packed(quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet_quantization.layers._CHUNK", 64 * 40)
    weight, released = floats(100, 64), []
    part = dataclasses.replace(stored(weight), release=lambda begin, end: released.append((begin, end)))
    made = quantization().linear([part])
    assert released == [(0, 40), (40, 80), (80, 100)]
    x = tokens(3, 64)
    assert torch.equal(made(x), quantization().linear([stored(weight)])(x))


def test_bytes_per_weight() -> None:
    weight = floats(64, 256)
    assert int8(group=32).linear([stored(weight)]).weight_bytes == 64 * 256 * 8.5 / 8
    assert int4().linear([stored(weight)]).weight_bytes == 64 * 256 * 5 / 8
    assert int4(offsets=False).linear([stored(weight)]).weight_bytes == 64 * 256 * 4.5 / 8


def test_four_bits_are_placed_well() -> None:
    """Better than sixteen levels from the smallest to the largest weight of a group."""
    weight = floats(64, 256)
    x = torch.eye(256)
    low, high = weight.view(64, -1, 32).aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    plain = (((weight.view(64, -1, 32) - low) / step).round() * step + low).view(64, 256)
    found = int4(activations="int16").linear([stored(weight)])(x).T
    assert error(found, weight) < 0.97 * error(plain, weight)


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3])
def test_groups_of_equal_weights(value: float) -> None:
    weight = torch.full((32, 64), value)
    for quantization in (int8(activations="int16"), int4(activations="int16"), int4(offsets=False)):
        found = quantization.linear([stored(weight)])(torch.eye(64)).T
        assert (found - weight).abs().max() < 2e-3


def test_weights_of_any_size() -> None:
    """Scales are float16 numbers, and tiny weights are not lost to their range."""
    for size in (1e-4, 0.01, 100.0):
        weight = floats(32, 64) * size
        for quantization, most in ((int8(activations="int16"), 0.007), (int4(activations="int16"), 0.09)):
            found = quantization.linear([stored(weight)])(torch.eye(64)).T
            assert error(found, weight) < most


def test_what_is_quantised() -> None:
    quantization = int8(exclude=["*.o_proj", "model.layers.0.*"])
    assert quantization.accepts("model.layers.1.mlp.up_proj", (64, 32), "bfloat16")
    assert quantization.accepts("model.layers.1.mlp.up_proj.weight", (64, 33), "Q4_K")
    assert not quantization.accepts("model.layers.1.self_attn.o_proj", (64, 32), "bfloat16")
    assert not quantization.accepts("model.layers.0.mlp.up_proj.weight", (64, 32), "bfloat16")
    assert not quantization.accepts("model.layers.1.mlp.up_proj", (64, 32), "IQ1_S")
    assert not quantization.accepts("model.layers.1.mlp.experts", (4, 64, 32), "bfloat16")
    assert not quantization.accepts("model.layers.1.mlp.up_proj", (64, 1 << 17), "bfloat16")


def test_the_head() -> None:
    for quantization in (int8(lm_head=False), int4(lm_head=False), gguf(lm_head=False)):
        assert not quantization.accepts("lm_head", (64, 32), "Q8_0")
    for quantization in (int8(), int4(), gguf()):
        assert quantization.accepts("lm_head", (64, 32), "Q8_0")
    weight = floats(64, 32)
    sizes = [int4(lm_head=bits).linear([stored(weight, "lm_head")]).weight_bytes for bits in (4, True, 8)]
    assert sizes == [64 * 32 * 5 // 8, 64 * 32 * 5 // 8, 64 * 34]


def test_gguf_takes_blocks_only() -> None:
    assert not gguf().accepts("model.layers.1.mlp.up_proj", (64, 32), "bfloat16")
    assert not gguf().accepts("model.layers.1.mlp.up_proj", (64, 32), "F16")


def test_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda: None)
    x = tokens(4, 256)
    weight, bias = floats(40, 256), torch.arange(40.0)
    part, blocks_weight = blocks("Q4_K", 24, 256)
    layer = int4().linear([stored(weight, bias=bias), part])
    assert isinstance(layer, DequantizingLinear)
    exact = torch.cat([x @ weight.T, x @ blocks_weight.T], 1)
    found = layer(x)
    found[:, :40] -= bias
    assert error(found, exact) < 0.09
    assert error(found[:, 40:], exact[:, 40:]) < 1e-6
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.weight_bytes == 64 * 256 + 2 * 64 * 8 * 4 + 64 * 4


def test_an_option_for_a_gpu_has_no_effect_on_a_cpu() -> None:
    for kind, options in ((Int8, Int8Options(backend="torchao")), (Int4, Int4Options(backend="triton"))):
        with pytest.raises(PluginError, match=r"plugins\.quantization\.backend has no effect on a CPU: leave it out"):
            kind(context(), options)


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("int8", {"group": 48}, "group"),
        ("int8", {"activations": "float"}, "activations"),
        ("int8", {"activation_group": 16}, "activation_group"),
        ("int4", {"lm_head": 5}, "lm_head"),
        ("int8", {"backend": "cuda"}, "backend"),
        ("gguf", {"bits": 4}, "bits"),
    ],
)
def test_wrong_options_are_named(use: str, options: dict[str, Any], message: str) -> None:
    class Case(Suite):
        role = "quantization"

    Case.use = use
    case = Case()
    context = case.worker_context()
    with pytest.raises(PluginError, match=rf"{use}.*{message}"):
        case.make(context, **options)


def test_weights_that_no_float16_scale_reaches() -> None:
    with pytest.raises(ModelLoadError, match=r"model.layers.0.mlp.up_proj.*exclude"):
        int4().linear([stored(floats(32, 64) * 1e6)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("quantization", [int8, lambda: int8(group=None), int4, lambda: int4(offsets=False)])
@pytest.mark.parametrize("compiled", [True, False])
def test_weights_that_are_no_numbers_are_named(
    value: float, quantization: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet_quantization.layers._CHUNK", 8 * 64)
    if not compiled:
        monkeypatch.setattr(build, "library", lambda: None)
    weight = floats(32, 64)
    weight[21, 40] = value
    good = stored(floats(32, 64), "model.layers.0.mlp.gate_proj")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.0\.mlp\.up_proj\.weight holds NaN or infinity.* row 21:"):
        quantization().linear([good, stored(weight)])


def test_blocks_with_a_scale_that_is_no_number_are_named() -> None:
    part, _ = blocks("Q8_0", 24, 256)
    part.tensors["weight"].reshape(-1, 34)[8 * 5 + 2, :2] = (0xFF, 0x7F)
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight holds NaN or infinity, first in row 5:"):
        gguf().linear([part])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("columns", [1, 16, 40, 128, 256, 320])
@pytest.mark.parametrize("rows", [1, 32, 47])
def test_plans_of_rounded_weights(rows: int, columns: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(build, "library", lambda: None)
    for quantization in (
        int8(),
        int8(group=32, activation_group=128),
        int8(group=None),
        int8(group=None, activation_group=None),
        int8(activations="int16"),
        int4(),
        int4(offsets=False, activation_group=128),
        int4(activation_group=None),
        int4(eight_bits=()),
    ):
        weight, bias = floats(rows, columns), floats(rows, 1)[:, 0]
        compare_plan(quantization, [stored(weight)])
        compare_plan(quantization, [stored(weight, bias=bias), stored(weight.bfloat16(), "a.v_proj", bias)])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", sorted(kind.name for kind in FORMATS))
def test_plans_of_blocks(kind: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(build, "library", lambda: None)
    part, _ = blocks(kind, 40, 512)
    other, _ = blocks("Q8_0", 24, 512)
    for quantization in (gguf(), gguf(activation_group=128), int8(), int8(group=32), int4(), int4(offsets=False)):
        compare_plan(quantization, [part, other, part])
