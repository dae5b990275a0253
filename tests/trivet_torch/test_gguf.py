"""Dequantisation agrees bit for bit with the format's reference implementation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from trivet.gguf import BLOCK_SIZES, GGMLType
from trivet_torch.weights.gguf_dequant import SUPPORTED_TYPES, dequantize_into

# Positions (in bytes) of the float16 factors of a block, which must be finite numbers.
_HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def random_blocks(name: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Blocks of arbitrary bits, with finite factors that include zero, negative and subnormal ones."""
    rng = np.random.default_rng(seed)
    _, block_bytes = BLOCK_SIZES[GGMLType[name]]
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    for start in _HALVES[name]:
        factors = rng.normal(scale=10.0 ** rng.integers(-7, 3, num_blocks)).astype(np.float16)
        factors[::17] = 0
        blocks[:, start : start + 2] = factors[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", sorted(_HALVES))
def test_block_types_equal_the_reference_in_float32(name: str) -> None:
    blocks = random_blocks(name, 1031)
    expected = quants.dequantize(blocks, GGMLQuantizationType[name])

    out = torch.empty(1031, BLOCK_SIZES[GGMLType[name]][0])
    dequantize_into(out, blocks.reshape(-1), GGMLType[name])

    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("name", sorted(_HALVES))
def test_a_tensor_of_several_chunks_is_the_join_of_its_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(name, 37)
    whole = torch.empty(37, BLOCK_SIZES[GGMLType[name]][0])
    dequantize_into(whole, blocks.reshape(-1), GGMLType[name])

    monkeypatch.setattr("trivet_torch.weights.gguf_dequant._CHUNK_ELEMENTS", 1024)
    parts = torch.empty_like(whole)
    dequantize_into(parts, blocks.reshape(-1), GGMLType[name])

    assert torch.equal(whole, parts)


@pytest.mark.parametrize(
    ("name", "numpy_dtype"),
    [("F32", "f4"), ("F16", "f2"), ("F64", "f8"), ("I8", "i1"), ("I16", "i2"), ("I32", "i4"), ("I64", "i8")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_types_are_rounded_to_the_requested_dtype(name: str, numpy_dtype: str, dtype: torch.dtype) -> None:
    source = (np.random.default_rng(1).normal(size=(5, 7)) * 100).astype(numpy_dtype)
    out = torch.empty(5, 7, dtype=dtype)
    dequantize_into(out, source.reshape(-1).view(np.uint8), GGMLType[name])
    assert torch.equal(out, torch.from_numpy(source).to(dtype))


def test_bfloat16_equals_the_reference() -> None:
    raw = quants.quantize(np.random.default_rng(2).normal(size=(6, 32)).astype(np.float32), GGMLQuantizationType.BF16)
    out = torch.empty(6, 32)
    dequantize_into(out, raw.reshape(-1), GGMLType.BF16)
    np.testing.assert_array_equal(out.numpy(), quants.dequantize(raw, GGMLQuantizationType.BF16))


def test_values_are_rounded_once_from_float32() -> None:
    blocks = random_blocks("Q6_K", 64)
    exact = torch.empty(64, 256)
    dequantize_into(exact, blocks.reshape(-1), GGMLType.Q6_K)
    rounded = torch.empty(64, 256, dtype=torch.bfloat16)
    dequantize_into(rounded, blocks.reshape(-1), GGMLType.Q6_K)
    assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_a_slice_of_a_fused_parameter_is_filled_and_the_rest_untouched() -> None:
    blocks = random_blocks("Q8_0", 3 * 4 * 2)  # 3 experts, 4 rows of 64 elements
    expected = torch.empty(3, 4, 64)
    dequantize_into(expected, blocks.reshape(-1), GGMLType.Q8_0)

    fused = torch.full((3, 8, 64), -1.0)
    dequantize_into(fused[:, 4:], blocks.reshape(-1), GGMLType.Q8_0)

    assert torch.equal(fused[:, 4:], expected)
    assert (fused[:, :4] == -1).all()


def test_every_supported_block_type_is_compared_with_the_reference() -> None:
    blocks = {kind.name for kind in SUPPORTED_TYPES if BLOCK_SIZES[kind][0] > 1}
    assert blocks == set(_HALVES)


def test_block_sizes_equal_the_reference() -> None:
    for kind, sizes in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]] == sizes
        assert GGMLQuantizationType[kind.name] == kind
