"""Norms, rotations and gated activations in Triton against torch's own operations, and what compilers say of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _compile import TARGETS, compile_for
from torch import Tensor

from trivet_kernels.ops import Ops
from trivet_kernels.reference.ops import ReferenceOps
from trivet_kernels.triton.ops import TritonOps, norm_warps, rotary_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: relative and absolute error: one rounding of the type (the interpreter cuts bfloat16 off), sums in another order
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
OPS, REFERENCE = TritonOps(), ReferenceOps()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    bound = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 80), (5, 1024), (2, 5000), (4, 3, 96), (2, 2, 3, 64), (7,)])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1])
    before = x.clone()
    expected = REFERENCE.rms_norm(x, weight, 1e-6)
    assert_near(OPS.rms_norm(x, weight, 1e-6), expected)
    assert torch.equal(x, before)
    out = torch.full_like(x, torch.nan)
    assert OPS.rms_norm(x, weight, 1e-6, out) is out
    assert_near(out, expected)
    assert OPS.rms_norm(x, weight, 1e-6, x) is x
    assert_near(x, expected)


def test_norm_of_strided_rows_leaves_what_is_between_them() -> None:
    wide = random(6, 7, 3 * 96)
    before = wide.clone()
    view, weight = wide[:, 1:5, 96:192], random(96)
    expected = REFERENCE.rms_norm(view, weight, 1e-5)
    assert_near(OPS.rms_norm(view, weight, 1e-5), expected)
    OPS.rms_norm(view, weight, 1e-5, view)
    assert_near(view, expected)
    before[:, 1:5, 96:192] = wide[:, 1:5, 96:192]
    assert torch.equal(wide, before)


def test_norm_of_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(9, 600), random(600)
    together = OPS.rms_norm(x, weight, 1e-6)
    for row in range(9):
        assert torch.equal(OPS.rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", [None, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8), (4, 896), (3, 2500)])
def test_norm_of_a_residual_sum(dtype: torch.dtype, residual_dtype: torch.dtype | None, shape: tuple[int, int]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1])
    wide = random(shape[0], shape[1] + 24, dtype=residual_dtype or dtype, seed=1)
    residual = wide[:, 8 : 8 + shape[1]]
    expected_residual = residual.clone()
    REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-6)
    untouched = wide.clone()
    got = OPS.add_rms_norm(x, residual, weight, 1e-6)
    assert_near(residual, expected_residual)
    # The norm is of the sum as it was stored.
    assert_near(got, REFERENCE.rms_norm(residual, weight, 1e-6))
    untouched[:, 8 : 8 + shape[1]] = residual
    assert torch.equal(wide, untouched)


def turn(ops: Ops, query: Tensor, key: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    query, key = query.clone(), key.clone()
    ops.rotary(query, key, **options)
    return query, key


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated"), [(4, 4, 64, 64), (7, 1, 80, 20), (12, 2, 96, 96), (3, 2, 128, 32)]
)
def test_rotation(
    dtype: torch.dtype, interleaved: bool, norm: bool, heads: int, kv_heads: int, size: int, rotated: int
) -> None:
    tokens = 5
    fused = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    query, key, value = fused.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    query, key = query.view(tokens, heads, size), key.view(tokens, kv_heads, size)
    angles = torch.outer(torch.arange(50.0), 1000.0 ** (-torch.arange(rotated // 2) / (rotated // 2)))
    options: dict[str, Any] = {
        "positions": torch.tensor([0, 49, 3, 3, 17]),
        "table": 1.1 * torch.cat([angles.cos(), angles.sin()], 1),
        "interleaved": interleaved,
    }
    if norm:
        options |= {"query_weight": random(size), "key_weight": random(size, seed=1), "eps": 1e-6}
    expected = turn(REFERENCE, query, key, **options)
    values = value.clone()
    OPS.rotary(query, key, **options)
    for got, wanted in zip((query, key), expected, strict=True):
        assert_near(got, wanted)
    assert torch.equal(value, values)
    if rotated < size and not norm:
        assert torch.equal(query[..., rotated:], expected[0][..., rotated:])


def test_only_one_of_queries_and_keys_may_have_a_norm() -> None:
    query, key = random(3, 4, 64), random(3, 2, 64, seed=1)
    options: dict[str, Any] = {"positions": torch.arange(3), "table": random(8, 64), "eps": 1e-5}
    for weight in ({"query_weight": random(64)}, {"key_weight": random(64)}):
        for got, wanted in zip(
            turn(OPS, query, key, **options, **weight), turn(REFERENCE, query, key, **options, **weight), strict=True
        ):
            assert_near(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 50, 1024, 2500])
def test_gated_activations(dtype: torch.dtype, size: int) -> None:
    wide = 3 * random(4, 2 * size + 16, dtype=dtype)
    x = wide[:, : 2 * size]
    x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, 0.0
    for kernel, reference in (
        (OPS.silu_and_mul, REFERENCE.silu_and_mul),
        (OPS.gelu_and_mul, REFERENCE.gelu_and_mul),
        (lambda t: OPS.gelu_and_mul(t, approximate=False), lambda t: REFERENCE.gelu_and_mul(t, approximate=False)),
    ):
        assert_near(kernel(x), reference(x))
    out = torch.full((4, size + 3), torch.nan, dtype=dtype)
    assert_near(OPS.silu_and_mul(x, out[:, :size]), REFERENCE.silu_and_mul(x))
    assert out[:, size:].isnan().all()


def test_no_rows_are_no_launch() -> None:
    assert OPS.rms_norm(random(0, 8), random(8), 1e-6).shape == (0, 8)
    assert OPS.add_rms_norm(random(0, 8), random(0, 8), random(8), 1e-6).shape == (0, 8)
    assert OPS.silu_and_mul(random(0, 8)).shape == (0, 4)
    OPS.rotary(random(0, 2, 8), random(0, 1, 8), torch.zeros(0, dtype=torch.int64), random(4, 8))


def test_elements_of_a_row_must_be_neighbours() -> None:
    x = random(8, 6).t()
    for call in (
        lambda: OPS.rms_norm(x, random(8), 1e-6),
        lambda: OPS.add_rms_norm(x, random(6, 8), random(8), 1e-6),
        lambda: OPS.silu_and_mul(x),
        lambda: OPS.rotary(x[:, None], random(6, 1, 8), torch.arange(6), random(6, 8)),
    ):
        with pytest.raises(ValueError, match="the last dimension must be contiguous"):
            call()


def norm_case(dtype: str, size: int, *, add: bool) -> tuple[str, dict[str, str], dict[str, Any], int]:
    block = 1 << (size - 1).bit_length()
    pointers = {"x": f"*{dtype}", "weight": "*fp32", "out": f"*{dtype}", "eps": "fp32", "x_row_stride": "i32"}
    constants = {"size": size, "block": block}
    if add:
        signature = pointers | {"residual": f"*{dtype}", "residual_row_stride": "i32", "out_row_stride": "i32"}
        return "trivet_kernels.triton.norm:add_norm_kernel", signature, constants, norm_warps(block)
    names = ("inner", "x_outer_stride", "out_outer_stride", "out_row_stride")
    return (
        "trivet_kernels.triton.norm:norm_kernel",
        pointers | dict.fromkeys(names, "i32"),
        constants,
        norm_warps(block),
    )


def rotary_case(
    dtype: str, size: int, rotated: int, *, interleaved: bool, norm: bool
) -> tuple[str, dict[str, str], dict[str, Any], int]:
    pairs, heads = rotary_blocks(rotated, size)
    signature = {"query": f"*{dtype}", "key": f"*{dtype}", "positions": "*i64", "table": "*fp32", "eps": "fp32"}
    names = ("query_row", "query_head", "key_row", "key_head", "table_row")
    signature |= {f"{name}_stride": "i32" for name in names} | {"num_query_heads": "i32", "num_key_heads": "i32"}
    rest = 1 << (max(size - rotated, 1) - 1).bit_length()
    constants = {"interleaved": interleaved, "norm_query": norm, "norm_key": norm, "size": size, "rotated": rotated}
    constants |= {"pairs": pairs, "rest": rest, "block_heads": heads}
    weights = ("query_weight", "key_weight")
    if norm:
        signature |= dict.fromkeys(weights, "*fp32")
    else:
        constants |= dict.fromkeys(weights)
    return "trivet_kernels.triton.rope:rotary_kernel", signature, constants, 4


def gated_case(dtype: str, kind: int) -> tuple[str, dict[str, str], dict[str, Any], int]:
    signature = {"x": f"*{dtype}", "out": f"*{dtype}", "x_row_stride": "i32", "out_row_stride": "i32", "size": "i32"}
    return "trivet_kernels.triton.activation:gated_kernel", signature, {"kind": kind, "block": 1024}, 4


DEFAULT_CASES = [
    norm_case("bf16", 4096, add=False),
    norm_case("bf16", 4096, add=True),
    rotary_case("bf16", 128, 128, interleaved=False, norm=True),
    gated_case("bf16", 0),
]
MORE_CASES = [
    *(norm_case(dtype, size, add=add) for dtype in ("fp32", "fp16") for size in (128, 16384) for add in (False, True)),
    *(
        rotary_case(dtype, size, rotated, interleaved=interleaved, norm=norm)
        for dtype in ("fp32", "bf16", "fp16")
        for size, rotated in ((64, 64), (80, 20), (256, 256))
        for interleaved in (False, True)
        for norm in (False, True)
    ),
    *(gated_case(dtype, kind) for dtype in ("fp32", "bf16", "fp16") for kind in (0, 1, 2)),
]


def assert_fits(case: tuple[str, dict[str, str], dict[str, Any], int], target: str) -> None:
    kernel, signature, constants, num_warps = case
    compiled = compile_for(kernel, signature, constants, target, num_warps=num_warps)
    assert compiled.shared <= compiled.shared_limit
    assert compiled.spills == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", DEFAULT_CASES, ids=lambda case: case[0].partition(":")[2])
def test_kernels_compile_without_spills(case: tuple[str, dict[str, str], dict[str, Any], int], target: str) -> None:
    assert_fits(case, target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case[0].partition(":")[2])
def test_all_variants_compile_without_spills(
    case: tuple[str, dict[str, str], dict[str, Any], int], target: str
) -> None:
    assert_fits(case, target)
