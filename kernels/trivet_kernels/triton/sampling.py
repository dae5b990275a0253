"""Drawing tokens on a GPU without sorting a vocabulary: two launches, whatever the rows' parameters.

The outcome is :mod:`trivet_kernels.reference.sampling`'s. The first launch scans the vocabulary, each row by many
programs, for the largest logit of each group of 128 ids. In the second a program for each row bounds from these what
the cuts of top-k and top-p must reach, narrows the cuts down over the few groups that reach it, by bisection on ranks
that no two tokens share, and draws. Gumbel noise is bounded by groups too, so few groups are looked into for it.

A row's outcome depends on its own numbers only: counts and probabilities are added up as integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton

from trivet_kernels.reference.noise import GROUP
from trivet_kernels.triton._draw import draw_kernel
from trivet_kernels.triton._rank import group_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

#: largest vocabulary: sums of probabilities are integers of 63 bits
MAX_SIZE = 1 << 19
DRAW_WARPS = 8


class Parameters(NamedTuple):
    """How the rows of a step are sampled, in one tensor, to be copied at once.

    ``columns`` ``[6, n]`` int64 are temperature (0: greedy), top-k, top-p, the logarithm of min-p, seed and position;
    temperature, top-p and min-p are the bits of float64 numbers. ``total``: a row needs the sum of all probabilities.
    """

    columns: Tensor
    total: bool

    def to(self, device: torch.device) -> Parameters:
        """The same on a device; from pinned memory without waiting."""
        return Parameters(self.columns.to(device, non_blocking=True), self.total)


def parameters(
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    *,
    pin: bool = False,
) -> Parameters:
    """Pack columns ``[n]``, which have the ranges of :func:`trivet_kernels.reference.sampling.survivors` and ``draw``.

    Args:
        temperature: 0 takes the likeliest token, whatever the other columns say.
        top_k: 0 keeps all.
        top_p: Above 0; 1 keeps all.
        min_p: Below 1; 0 keeps all.
        seeds: All 64 bits count.
        positions: Position of the token in the output.
        pin: Whether to use pinned memory.
    """
    columns = torch.empty(6, len(temperature), dtype=torch.int64, pin_memory=pin)
    rows = columns.numpy()
    floats = rows.view(np.float64)
    floats[0], rows[1], floats[2], rows[4], rows[5] = temperature, top_k, top_p, seeds, positions
    floats[3] = -np.inf
    np.log(min_p, out=floats[3], where=min_p > 0)
    whole = (temperature > 0) & (top_k == 0) & (top_p < 1) & (min_p == 0)
    return Parameters(columns, bool(whole.any()))


def draw(logits: Tensor, size: int, params: Parameters) -> Tensor:
    """Draw a token for each row.

    Args:
        logits: ``[n, vocab_size]`` float32, bfloat16 or float16, not changed; a row's elements are contiguous.
        size: Ids that may be drawn, below :data:`MAX_SIZE`.
        params: Of the ``n`` rows, on the same device.

    Returns:
        ``[2, n]`` int32: ids, and the bits of the float32 largest logits, divided by the temperatures; NaN if the row
        has a NaN. The id is 0 where that is not finite.
    """
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"size must be from 1 to {MAX_SIZE}, got {size}")
    count, num_groups = len(logits), -(-size // GROUP)
    device = logits.device
    out = torch.empty(2, count, dtype=torch.int32, device=device)
    if count == 0:
        return out
    maxima = torch.empty(2, count, num_groups, dtype=torch.float32, device=device)
    chosen = torch.empty(count, num_groups, dtype=torch.int32, device=device)
    floats = params.columns.view(torch.float64)
    groups = scan_groups(count, num_groups)
    group_kernel[(count, triton.cdiv(num_groups, groups))](
        logits,
        floats[0],
        maxima[0],
        None,
        maxima[1],
        logits.stride(0),
        size,
        size,
        num_groups,
        divide=True,
        total=params.total,
        beyond=False,
        groups=groups,
        num_warps=4,
    )
    draw_kernel[(count,)](
        logits,
        floats[0],
        params.columns[1],
        floats[2],
        floats[3],
        params.columns[4],
        params.columns[5],
        maxima[0],
        maxima[1],
        chosen,
        out[0],
        out[1].view(torch.float32),
        logits.stride(0),
        size,
        num_groups,
        total=params.total,
        id_bits=(size - 1).bit_length(),
        block_groups=triton.next_power_of_2(num_groups),
        num_warps=DRAW_WARPS,
    )
    return out


def scan_groups(rows: int, num_groups: int) -> int:
    """Groups that a program scans: few where there are few rows, so that all of a chip has work."""
    return 8 if rows * num_groups < 16384 else 32
