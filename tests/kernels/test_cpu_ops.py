"""The C operations: layouts, independence of rows and threads, every instruction set, and what they refuse."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trivet_kernels.cpu import build
from trivet_kernels.cpu.levels import Level, usable_levels
from trivet_kernels.cpu.ops import NativeOps
from trivet_kernels.ops import Ops
from trivet_kernels.reference.ops import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6
#: those that make a difference here
LEVELS = [level for level in usable_levels() if level.name in {"amx", "avx512_bf16", "avx512", "avx2", "generic"}]


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    found = build.library()
    if found is None:
        pytest.skip(f"no native kernels: {build.problem()}")
    return NativeOps(found)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inside(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random rows as a view of some columns of a matrix, and that matrix."""
    whole = torch.randn(rows + 2, columns + 13).to(dtype)
    return whole[1:-1, 5 : 5 + columns], whole


def outside(whole: Tensor, rows: int, columns: int) -> Tensor:
    """What does not belong to that view."""
    mask = torch.ones_like(whole, dtype=torch.bool)
    mask[1 : 1 + rows, 5 : 5 + columns] = False
    return whole[mask]


def test_views_of_wider_matrices_are_computed_in_place_of_nothing_else(ops: NativeOps, dtype: torch.dtype) -> None:
    x, x_whole = inside(3, 70, dtype)
    residual, residual_whole = inside(3, 70, dtype)
    out, out_whole = inside(3, 70, dtype)
    gated, _ = inside(3, 140, dtype)
    weight = torch.rand(70)
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-5
    checked: list[Callable[[Ops, Tensor | None], Tensor]] = [
        lambda o, r: o.rms_norm(x, weight, EPS, r),
        lambda o, r: o.add_rms_norm(x, residual.clone(), weight, EPS, r),
        lambda o, r: o.silu_and_mul(gated, r),
        lambda o, r: o.gelu_and_mul(gated, r),
    ]
    for call in checked:
        around = outside(out_whole, 3, 70).clone()
        torch.testing.assert_close(call(ops, out), call(ReferenceOps(), None), rtol=tolerance, atol=1e-5)
        assert torch.equal(outside(out_whole, 3, 70), around)
    around, before = outside(residual_whole, 3, 70).clone(), x_whole.clone()
    ops.add_rms_norm(x, residual, weight, EPS, out)
    assert torch.equal(outside(residual_whole, 3, 70), around)
    assert torch.equal(x_whole, before)


def test_heads_of_a_fused_matrix_are_rotated_where_they_are(ops: NativeOps, dtype: torch.dtype) -> None:
    fused = torch.randn(5, (4 + 2 + 2) * 24).to(dtype)
    before, other = fused.clone(), fused.clone()
    positions, table, weight = torch.arange(5), torch.rand(5, 16), torch.rand(24)
    for each, one in ((ops, fused), (ReferenceOps(), other)):
        query, key = one[:, : 4 * 24].view(5, 4, 24), one[:, 4 * 24 : 6 * 24].view(5, 2, 24)
        each.rotary(query, key, positions, table, query_weight=weight, eps=EPS)
    torch.testing.assert_close(fused, other, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert torch.equal(fused[:, 6 * 24 :], before[:, 6 * 24 :])  # the values
    keys = fused[:, 4 * 24 : 6 * 24].view(5, 2, 24)
    assert torch.equal(keys[..., 16:], before[:, 4 * 24 : 6 * 24].view(5, 2, 24)[..., 16:])  # what is not rotated


def test_heads_are_normalised_in_a_fused_matrix(ops: NativeOps, dtype: torch.dtype) -> None:
    fused = torch.randn(5, 3 * 20 + 7).to(dtype)
    heads, weight = fused[:, 7:].view(5, 3, 20), torch.rand(20)
    want = ops.rms_norm(heads.contiguous().view(15, 20), weight, EPS)
    assert torch.equal(ops.rms_norm(heads, weight, EPS, heads).reshape(15, 20), want)


def calls(ops: Ops, x: Tensor, residual: Tensor, weight: Tensor, table: Tensor) -> list[Tensor]:
    """Everything there is, on copies of ``x`` ``[T, 2 * N]``."""
    summed, turned, rows = residual.clone(), x.clone().view(len(x), -1, 64), len(x)
    out = [
        ops.rms_norm(x, weight, EPS),
        ops.add_rms_norm(x, summed, weight, EPS),
        summed,
        ops.silu_and_mul(x),
        ops.gelu_and_mul(x),
        ops.gelu_and_mul(x, approximate=False),
    ]
    ops.rotary(turned[:, :-2], turned[:, -2:], torch.arange(rows) % len(table), table, query_weight=weight[:64])
    return [*out, turned]


def test_rows_depend_neither_on_their_number_nor_on_threads(
    ops: NativeOps, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    rows, columns = 80, 1920
    x, residual = torch.randn(2, rows, columns).to(dtype)
    weight, table = torch.rand(columns), torch.rand(1, 64)
    threads(1)
    want = calls(ops, x, residual, weight, table)
    singly = [calls(ops, x[i : i + 1], residual[i : i + 1], weight, table) for i in range(rows)]
    for number, tensor in enumerate(want):
        assert torch.equal(torch.cat([one[number] for one in singly]), tensor)
    for count in (2, 3):
        threads(count)
        for got, tensor in zip(calls(ops, x, residual, weight, table), want, strict=True):
            assert torch.equal(got, tensor)


def test_other_layouts_and_types_are_left_to_torch(ops: NativeOps) -> None:
    weight, reference = torch.rand(12), ReferenceOps()
    across = torch.randn(12, 4).t()
    assert torch.equal(ops.rms_norm(across, weight, EPS), reference.rms_norm(across, weight, EPS))
    assert torch.equal(ops.silu_and_mul(across), reference.silu_and_mul(across))
    x, residual = torch.randn(4, 12).half(), torch.randn(4, 12)
    other = residual.clone()
    out = ops.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(out, reference.add_rms_norm(x, other, weight, EPS))
    assert torch.equal(residual, other)
    double = weight.double()
    wide = torch.randn(4, 12, dtype=torch.float64)
    assert torch.equal(ops.rms_norm(wide, double, EPS), reference.rms_norm(wide, double, EPS))
    query, key = torch.randn(4, 2, 8), torch.randn(4, 1, 8).bfloat16()
    again, key_again = query.clone(), key.clone()
    ops.rotary(query, key, torch.arange(4), torch.ones(4, 8))
    reference.rotary(again, key_again, torch.arange(4), torch.ones(4, 8))
    assert torch.equal(query, again)
    assert torch.equal(key, key_again)


def test_what_does_not_fit_together_is_refused(ops: NativeOps) -> None:
    x, weight, three = torch.ones(2, 8), torch.ones(8), torch.ones(2, 3, 8)
    with pytest.raises(ValueError, match=r"weight must be \[8\].*not \[1\]"):
        ops.rms_norm(x, torch.ones(1), EPS)
    with pytest.raises(ValueError, match=r"out must be \[2, 8\]"):
        ops.rms_norm(x, weight, EPS, torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"residual must be \[2, 8\]"):
        ops.add_rms_norm(x, torch.ones(1, 8), weight, EPS)
    with pytest.raises(ValueError, match="weight must be"):
        ops.add_rms_norm(x, x.clone(), torch.ones(9), EPS)
    with pytest.raises(ValueError, match="out must be"):
        ops.add_rms_norm(x, x.clone(), weight, EPS, torch.ones(3, 8))
    with pytest.raises(ValueError, match="even number of columns"):
        ops.silu_and_mul(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"out must be \[2, 4\]"):
        ops.gelu_and_mul(x, torch.ones(2, 8))
    with pytest.raises(ValueError, match="must agree"):
        ops.rotary(three, torch.ones(3, 1, 8), torch.arange(2), torch.ones(4, 8))
    with pytest.raises(ValueError, match="must agree"):
        ops.rotary(three, three.clone(), torch.arange(3), torch.ones(4, 8))
    with pytest.raises(ValueError, match="at most 8"):
        ops.rotary(three, three.clone(), torch.arange(2), torch.ones(4, 10))
    with pytest.raises(ValueError, match="norm's weight"):
        ops.rotary(three, three.clone(), torch.arange(2), torch.ones(4, 8), key_weight=torch.ones(4))


@pytest.mark.parametrize("kind", ["silu", "tanh", "erf"])
def test_activations_are_accurate_to_the_last_bits(ops: NativeOps, kind: str) -> None:
    gate = torch.linspace(-40, 80, 1 << 16)[None]
    wide = gate.double()
    x = torch.cat((gate, torch.ones_like(gate)), 1)
    if kind == "silu":
        got, want = ops.silu_and_mul(x), wide * torch.sigmoid(wide)
    elif kind == "tanh":
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
        got, want = ops.gelu_and_mul(x), wide * torch.sigmoid(2 * inner)
    else:
        got = ops.gelu_and_mul(x, approximate=False)
        want = wide * 0.5 * torch.special.erfc(wide / -math.sqrt(2))
    error, last = (got.double() - want).abs(), 2.0**-23
    assert float((error / want.abs())[gate > -1].max()) < 3 * last
    assert float(error[gate <= -1].max()) < 2 * last


@pytest.mark.parametrize("position", [-1, 4, 1 << 40])
def test_positions_beyond_the_table_change_nothing(ops: NativeOps, position: int) -> None:
    query, key = torch.randn(2, 2, 8), torch.randn(2, 1, 8)
    before = query.clone(), key.clone()
    with pytest.raises(IndexError, match=r"positions must be in \[0, 4\)"):
        ops.rotary(query, key, torch.tensor([0, position]), torch.rand(4, 8))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_every_instruction_set_computes_the_same(
    ops: NativeOps, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    for source in (*build._SOURCES.glob("elementwise*.c"), *build._SOURCES.glob("*.h")):
        shutil.copy(source, sources)
    monkeypatch.setattr(build, "_SOURCES", sources)
    build._digest.cache_clear()
    try:
        other = NativeOps(build.load(build.build([level], tmp_path)))
    finally:
        build._digest.cache_clear()
    x, residual = torch.randn(2, 7, 6 * 64) * 3
    weight, table = torch.rand(6 * 64), torch.rand(7, 38)
    for dtype in DTYPES:
        pairs = zip(
            calls(other, x.to(dtype), residual.to(dtype), weight, table),
            calls(ReferenceOps(), x.to(dtype), residual.to(dtype), weight, table),
            strict=True,
        )
        for got, want in pairs:
            tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    # Sums that are halfway between two bfloat16 numbers, too large for one, infinite, or none at all.
    special = torch.tensor([1.0, 1.0078125, -1.0, 3.38e38, -3.38e38, torch.inf, -torch.inf, torch.nan, 0.0, 1e-30])
    special, step = special.repeat(4)[None].bfloat16(), torch.tensor([[2.0**-8, 3e36, 0.0, -1.0]]).bfloat16()
    step = step.repeat_interleave(10, 1)
    total = special.clone()
    other.add_rms_norm(step, total, torch.ones(40), EPS)
    assert torch.equal(
        total.float().nan_to_num(7.0), (special.float() + step.float()).bfloat16().float().nan_to_num(7.0)
    )
