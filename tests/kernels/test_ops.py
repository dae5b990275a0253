"""The operations between matrix products, of every implementation that runs on a CPU, against their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trivet_kernels.cpu import build
from trivet_kernels.cpu.ops import NativeOps
from trivet_kernels.ops import Ops, ops_for
from trivet_kernels.reference.ops import ReferenceOps

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}


@pytest.fixture(params=["reference", "chosen"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ReferenceOps() if request.param == "reference" else ops_for(CPU)


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def close(got: Tensor, want: Tensor) -> None:
    """``want`` is in float64; errors are relative to the larger ones of a tensor."""
    assert got.shape == want.shape
    bound = TOLERANCES[got.dtype] * (want.abs() + 1)
    assert bool(((got.double() - want).abs() <= bound).all())


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = [row / math.sqrt(float((row * row).sum()) / len(row) + eps) for row in x.double().flatten(0, -2)]
    return (torch.stack(rows) * weight.double()).view(x.shape)


def rotated(heads: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """Pair by pair, as complex numbers."""
    out, half = heads.double().clone(), table.shape[1] // 2
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        turn = torch.complex(table[positions, i].double(), table[positions, half + i].double())
        turned = torch.complex(heads[..., first].double(), heads[..., second].double()) * turn[:, None]
        out[..., first], out[..., second] = turned.real, turned.imag
    return out


def test_a_cpu_with_a_compiler_gets_native_operations() -> None:
    assert isinstance(ops_for(CPU), ReferenceOps if build.library() is None else NativeOps)


def test_a_cpu_without_a_compiler_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library", lambda: None)
    assert isinstance(ops_for(CPU), ReferenceOps)


def test_devices_without_operations_of_their_own_get_torch() -> None:
    assert isinstance(ops_for(torch.device("meta")), ReferenceOps)


@pytest.mark.parametrize("shape", [(1, 8), (3, 35), (5, 64), (2, 1), (0, 16), (4, 3, 24)], ids=str)
def test_rms_norm(ops: Ops, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    want = normalised(x, weight, 1e-5) if len(x) else x.double()
    out = torch.full_like(x, torch.nan)
    close(ops.rms_norm(x, weight, 1e-5), want)
    assert ops.rms_norm(x, weight, 1e-5, out) is out
    close(out, want)
    ops.rms_norm(x, weight, 1e-5, x)
    assert torch.equal(x, out)


def test_a_large_eps_keeps_rows_of_zeros_finite(ops: Ops) -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 16), torch.ones(16), 1e-6), torch.zeros(2, 16))


@pytest.mark.parametrize("size", [8, 35, 64])
def test_the_sum_before_a_norm_is_rounded_first(ops: Ops, dtype: torch.dtype, size: int) -> None:
    x, residual, weight = torch.randn(3, size).to(dtype), torch.randn(3, size).to(dtype), torch.randn(size)
    total = (x.double() + residual.double()).to(dtype)
    out = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    close(out, normalised(total, weight, 1e-6))
    again = residual.clone()
    out = ops.add_rms_norm(x, again, weight, 1e-6).clone()
    assert ops.add_rms_norm(x, residual, weight, 1e-6, x) is x
    assert torch.equal(x, out)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "width"), [(64, 64), (80, 80), (96, 24), (20, 6), (256, 256)])
def test_heads_are_rotated_by_their_positions(
    ops: Ops, dtype: torch.dtype, dim: int, width: int, interleaved: bool
) -> None:
    query, key = torch.randn(4, 3, dim).to(dtype), torch.randn(4, 1, dim).to(dtype)
    positions, table = torch.tensor([9, 0, 4, 4]), torch.rand(10, width)
    wanted = [rotated(heads, positions, table, interleaved) for heads in (query, key)]
    ops.rotary(query, key, positions, table, interleaved=interleaved)
    close(query, wanted[0])
    close(key, wanted[1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "width"), [(64, 64), (72, 36), (20, 10)])
def test_heads_are_normalised_before_they_are_rotated(
    ops: Ops, dtype: torch.dtype, dim: int, width: int, interleaved: bool
) -> None:
    query, key = torch.randn(4, 3, dim).to(dtype), torch.randn(4, 2, dim).to(dtype)
    plain = key.clone()
    positions, table, weight = torch.tensor([1, 2, 3, 0]), torch.rand(4, width), torch.rand(dim)
    want = rotated(normalised(query, weight, 1e-6), positions, table, interleaved)
    want_key = rotated(plain, positions, table, interleaved)
    ops.rotary(query, key, positions, table, interleaved=interleaved, query_weight=weight, eps=1e-6)
    close(query, want)
    close(key, want_key)  # has no weight, so is only rotated


def test_turning_by_nothing_and_back_changes_nothing(ops: Ops) -> None:
    angles = torch.rand(5, 8) * 6
    there = torch.cat((angles.cos(), angles.sin()), 1)
    back = torch.cat((angles.cos(), -angles.sin()), 1)
    query, key = torch.randn(5, 2, 16), torch.randn(5, 1, 16)
    turned, turned_key = query.clone(), key.clone()
    ops.rotary(turned, turned_key, torch.arange(5), there)
    assert not torch.allclose(turned, query)
    ops.rotary(turned, turned_key, torch.arange(5), back)
    assert torch.allclose(turned, query, atol=1e-6)
    assert torch.allclose(turned_key, key, atol=1e-6)


def gelu(x: float) -> float:
    return 0.5 * x * math.erfc(-x / math.sqrt(2))


def gelu_by_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize("size", [1, 16, 37, 5000])
@pytest.mark.parametrize("activation", [silu, gelu, gelu_by_tanh])
def test_gated_activations(ops: Ops, dtype: torch.dtype, activation: Callable[[float], float], size: int) -> None:
    gate = torch.linspace(-12, 12, 3 * size).view(3, size)
    x = torch.cat((gate, torch.randn(3, size)), 1).to(dtype)
    acted = torch.tensor([activation(v) for v in x[:, :size].flatten().tolist()], dtype=torch.float64).view(3, size)
    want = acted * x[:, size:].double()
    for out in (None, torch.full((3, size), torch.nan, dtype=dtype)):
        if activation is silu:
            got = ops.silu_and_mul(x, out)
        else:
            got = ops.gelu_and_mul(x, out, approximate=activation is gelu_by_tanh)
        close(got, want)
        assert out is None or got is out


@pytest.mark.parametrize("value", [torch.nan, 0.0, -0.0, 89.0, -89.0, 1e30, -1e30])
def test_extreme_gates(ops: Ops, value: float) -> None:
    x = torch.cat((torch.full((1, 20), value), torch.ones(1, 20)), 1)
    plain = torch.tensor(value)
    functional = torch.nn.functional
    for got, want in (
        (ops.silu_and_mul(x), functional.silu(plain)),
        (ops.gelu_and_mul(x), functional.gelu(plain, approximate="tanh")),
        (ops.gelu_and_mul(x, approximate=False), functional.gelu(plain)),
    ):
        assert torch.allclose(got, want.expand(1, 20), rtol=1e-6, atol=1e-30, equal_nan=True)
