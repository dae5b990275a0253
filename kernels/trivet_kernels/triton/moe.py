"""Mixtures of experts on a GPU: the products of all experts in two launches, whatever tokens chose.

Pairs of a token and one of its experts are sorted by expert, and every expert's pairs are cut into tiles of rows. How
many tiles there are is known on the device alone: the grid is for the most that there can be, a program finds its tile
from where the experts begin, and those beyond the last one end at once. So the host reads nothing, and a step can be
recorded. (The layout is that of Gale et al., "MegaBlocks", 2022, without padding.)

The rows of a tile are multiplied each by itself, all tiles have one shape, and a token's experts are added up in their
order: its result does not depend on its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from trivet_kernels.triton._span import dot
from trivet_kernels.triton.activation import GELU_ERF, GELU_TANH, SILU, activate, logistic
from trivet_kernels.triton.compat import architecture, jit

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.moe import StackedExperts

CLAMPED = tl.constexpr(3)
_KINDS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU_ERF, "clamped": CLAMPED}
#: columns that a program adds up of a token's experts
_COLUMNS = 1024


class Tile(NamedTuple):
    """What a program of a product computes: ``block_m`` pairs, ``block_n`` columns, ``block_k`` elements at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@jit()
def find_tile(
    tile: tl.tensor, starts: tl.tensor, experts: tl.constexpr, block_e: tl.constexpr, block_m: tl.constexpr
) -> tl.tensor:
    """The expert of a tile, and the sorted places ``[first, end)`` from the tile's first to the expert's last; nothing
    for a tile beyond the last one."""
    number = tl.arange(0, block_e)
    begin = tl.load(starts + number, mask=number < experts, other=0)
    end = tl.load(starts + number + 1, mask=number < experts, other=0)
    tiles = (end - begin + block_m - 1) // block_m
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    own = number == expert
    before = tl.sum(tl.where(own, last - tiles, 0), 0)
    first = tl.sum(tl.where(own, begin, 0), 0) + (tile - before) * block_m
    return expert, first, tl.sum(tl.where(own, end, 0), 0)


@jit()
def load_rows(at: tl.tensor, kept: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    """A piece of a matrix, with zeros where ``kept`` is not set, if any is ``masked``."""
    if masked:
        return tl.load(at, mask=kept, other=0.0)
    return tl.load(at)


@jit(unspecialized=("x_row_stride",))
def gate_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    x_row_stride: tl.tensor,
    slope: tl.tensor,
    limit: tl.tensor,
    top_k: tl.constexpr,
    experts: tl.constexpr,
    hidden: tl.constexpr,
    size: tl.constexpr,
    kind: tl.constexpr,
    block_e: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """``act(gate) * up`` of one tile of pairs, in sorted order, and a block of columns."""
    expert, first, end = find_tile(tl.program_id(0), starts, experts, block_e, block_m)
    if first < end:
        place = first + tl.arange(0, block_m)
        # Rows beyond the expert's last are computed of any token, and dropped.
        pair = tl.load(order + place, mask=place < end, other=0)
        rows = x + (pair // top_k) * x_row_stride
        column = tl.program_id(1) * block_n + tl.arange(0, block_n)
        kept = column < size
        gate_row = 2 * column if kind == CLAMPED else column
        up_row = 2 * column + 1 if kind == CLAMPED else size + column
        base = weight + expert.to(tl.int64) * (2 * size * hidden)
        gate = tl.zeros([block_m, block_n], tl.float32)
        up = tl.zeros([block_m, block_n], tl.float32)
        cut: tl.constexpr = hidden % block_k != 0
        masked: tl.constexpr = cut or size % block_n != 0
        for start in range(0, hidden, block_k):
            at = start + tl.arange(0, block_k)
            a = load_rows(rows[:, None] + at[None, :], (at < hidden)[None, :], cut)
            inside = kept[:, None] & (at < hidden)[None, :]
            gate_piece = load_rows(base + gate_row[:, None] * hidden + at[None, :], inside, masked)
            up_piece = load_rows(base + up_row[:, None] * hidden + at[None, :], inside, masked)
            gate = dot(a, tl.trans(gate_piece), gate)
            up = dot(a, tl.trans(up_piece), up)
        if bias is not None:
            own = bias + expert * (2 * size)
            gate += tl.load(own + gate_row, mask=kept, other=0.0).to(tl.float32)[None, :]
            up += tl.load(own + up_row, mask=kept, other=0.0).to(tl.float32)[None, :]
        if kind == CLAMPED:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
            gated = gate * logistic(slope * gate) * up
        else:
            gated = activate(gate, kind) * up
        to = out + place.to(tl.int64)[:, None] * size + column[None, :]
        tl.store(to, gated, mask=(place < end)[:, None] & kept[None, :])


@jit()
def down_kernel(
    out: tl.tensor,
    gated: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    experts: tl.constexpr,
    hidden: tl.constexpr,
    size: tl.constexpr,
    block_e: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """What the experts put out for one tile of pairs, in the pairs' own order, and a block of columns."""
    expert, first, end = find_tile(tl.program_id(0), starts, experts, block_e, block_m)
    if first < end:
        place = first + tl.arange(0, block_m)
        inside = place < end
        rows = gated + tl.where(inside, place, first).to(tl.int64) * size
        column = tl.program_id(1) * block_n + tl.arange(0, block_n)
        kept = column < hidden
        base = weight + expert.to(tl.int64) * (hidden * size) + column[:, None] * size
        acc = tl.zeros([block_m, block_n], tl.float32)
        cut: tl.constexpr = size % block_k != 0
        masked: tl.constexpr = cut or hidden % block_n != 0
        for start in range(0, size, block_k):
            at = start + tl.arange(0, block_k)
            a = load_rows(rows[:, None] + at[None, :], (at < size)[None, :], cut)
            piece = load_rows(base + at[None, :], kept[:, None] & (at < size)[None, :], masked)
            acc = dot(a, tl.trans(piece), acc)
        if bias is not None:
            acc += tl.load(bias + expert * hidden + column, mask=kept, other=0.0).to(tl.float32)[None, :]
        pair = tl.load(order + place, mask=inside, other=0)
        tl.store(out + pair[:, None] * hidden + column[None, :], acc, mask=inside[:, None] & kept[None, :])


@jit()
def sum_kernel(
    out: tl.tensor,
    outputs: tl.tensor,
    weights: tl.tensor,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The weighted sum of a token's outputs, in their order, for a block of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    kept = column < hidden
    total = tl.zeros([block], tl.float32)
    for number in tl.static_range(top_k):
        pair = token * top_k + number
        part = tl.load(outputs + pair * hidden + column, mask=kept, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + token * hidden + column, total, mask=kept)


def mixture(x: Tensor, chosen: Tensor, weights: Tensor, experts: StackedExperts) -> Tensor:
    """See :func:`trivet_kernels.moe.mixture`."""
    (tokens, hidden), top_k = x.shape, chosen.shape[1]
    count, _, size = experts.down.shape
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    pairs = tokens * top_k
    numbers, order = torch.sort(chosen.view(-1), stable=True)
    starts = torch.searchsorted(numbers, torch.arange(count + 1, device=x.device), out_int32=True)
    gate_tile, down_tile = tiles(x.dtype, architecture(x.device))
    # A tile is full or an expert's last, and none is empty.
    rows = min(pairs, pairs // gate_tile.block_m + count)
    block_e = triton.next_power_of_2(count)
    gated = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    gate_kernel[(rows, triton.cdiv(size, gate_tile.block_n))](
        gated,
        x,
        experts.gate_up,
        experts.gate_up_bias,
        order,
        starts,
        x.stride(0),
        experts.slope,
        experts.limit,
        top_k=top_k,
        experts=count,
        hidden=hidden,
        size=size,
        kind=_KINDS[experts.activation].value,
        block_e=block_e,
        **gate_tile._asdict(),
    )
    outputs = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    down_kernel[(rows, triton.cdiv(hidden, down_tile.block_n))](
        outputs,
        gated,
        experts.down,
        experts.down_bias,
        order,
        starts,
        experts=count,
        hidden=hidden,
        size=size,
        block_e=block_e,
        **down_tile._asdict(),
    )
    sum_kernel[(tokens, triton.cdiv(hidden, _COLUMNS))](
        out, outputs, weights, top_k=top_k, hidden=hidden, block=_COLUMNS, num_warps=4
    )
    return out


def tiles(dtype: torch.dtype, arch: str) -> tuple[Tile, Tile]:
    """Tiles of the two products, the same for any number of tokens, with as many rows: what a tile of few tokens wastes
    in arithmetic is hidden behind reading its weights."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 2), Tile(16, 64, 32, 4, 2)
    stages = 2 if arch.startswith("gfx") else 3
    return Tile(64, 64, 64, 4, stages), Tile(64, 128, 64, 4, stages)
