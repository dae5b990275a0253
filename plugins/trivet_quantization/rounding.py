"""Rounding groups of weights to few bits.

Every function takes groups ``[rows, groups, size]`` float32 and returns stored values of that shape in uint8, scales
``[rows, groups]``, and offsets ``[rows, groups]`` or None. A group with NaN or infinity has a scale of that kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trivet_kernels.cpu.linear import round_to_four

Rounded = tuple[Tensor, Tensor, Tensor | None]


def symmetric8(groups: Tensor) -> Rounded:
    """To -127 … 127 around zero, stored from 1 to 255; the largest magnitude of a group is kept."""
    scale = groups.abs().amax(-1, keepdim=True).div_(127)
    inverse = torch.where(scale > 0, scale.reciprocal(), torch.zeros(()))
    values = (groups * inverse).round_().clamp_(-127, 127).add_(128)
    return values.to(torch.uint8), scale.squeeze(-1), None


# How far the ends of the range are drawn in before levels are laid between them.
_SHRINKS = (1.0, 0.94, 0.88, 0.82)
# Divisors of the largest magnitude, which is on the side of eight levels.
_DIVISORS = (-8.8, -8.4, -8.0, -7.6, -7.2, -6.8)


def affine4(groups: Tensor) -> Rounded:
    """To sixteen levels ``scale * (0 … 15) + offset`` with a small squared error.

    Levels are laid over the range of a group, drawn in by several factors; weights are rounded to them, scale and
    offset are fitted to the rounded weights by least squares, and the best of those is taken: by a native kernel, which
    tries more, or here.
    """
    native = round_to_four(groups, offsets=True)
    if native is not None:
        return native
    low, high = groups.aminmax(dim=-1, keepdim=True)
    middle, half = (high + low) / 2, (high - low) / 2
    mean = groups.mean(-1, keepdim=True)
    best = None
    for shrink in _SHRINKS:
        step = half * (shrink / 7.5)
        inverse = torch.where(step > 0, step.reciprocal(), torch.zeros(()))
        start = middle - half * shrink
        values = (groups - start).mul_(inverse).round_().clamp_(0, 15)
        # Least squares: covariance over variance.
        centred = values - values.mean(-1, keepdim=True)
        variance = centred.square().sum(-1, keepdim=True)
        scale = (centred * groups).sum(-1, keepdim=True) / variance
        scale = torch.where(variance > 0, scale, step)
        offset = mean - scale * (values - centred)[..., :1]
        best = _better(best, groups, values, scale, offset)
    assert best is not None
    _, values, scale, offset = best
    return values.to(torch.uint8), scale.squeeze(-1), offset.squeeze(-1)


def symmetric4(groups: Tensor) -> Rounded:
    """To ``scale * (-8 … 7)`` with a small squared error, stored from 0 to 15.

    The scale may be negative. As with :func:`affine4`, several are tried and fitted by least squares."""
    native = round_to_four(groups, offsets=False)
    if native is not None:
        return native
    index = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, index)
    best = None
    zero = torch.zeros(())
    for divisor in _DIVISORS:
        inverse = torch.where(extreme != 0, divisor / extreme, zero)
        values = (groups * inverse).round_().clamp_(-8, 7)
        square = values.square().sum(-1, keepdim=True)
        scale = torch.where(square == 0, zero, (values * groups).sum(-1, keepdim=True) / square)  # NaN stays NaN
        best = _better(best, groups, values, scale, zero)
    assert best is not None
    _, values, scale, _ = best
    return values.add_(8).to(torch.uint8), scale.squeeze(-1), None


_Candidate = tuple[Tensor, Tensor, Tensor, Tensor]  # squared error, values, scale, offset


def _better(best: _Candidate | None, groups: Tensor, values: Tensor, scale: Tensor, offset: Tensor) -> _Candidate:
    """For each group the better of two ways to round it."""
    error = (values * scale).add_(offset).sub_(groups).square_().sum(-1, keepdim=True)
    if best is None:
        return error, values, scale, offset
    better = error < best[0]
    old_error, old_values, old_scale, old_offset = best
    return (
        torch.where(better, error, old_error),
        torch.where(better, values, old_values),
        torch.where(better, scale, old_scale),
        torch.where(better, offset, old_offset),
    )
