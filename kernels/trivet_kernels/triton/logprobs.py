"""Log-probabilities on a GPU: of one token of each row, its rank, and the likeliest tokens, without sorting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from trivet_kernels.reference import noise
from trivet_kernels.triton._rank import group_kernel, load_values, rank_key
from trivet_kernels.triton.compat import jit
from trivet_kernels.triton.noise import GROUP

if TYPE_CHECKING:
    from torch import Tensor

#: alternatives that are looked for one after the other; more are sorted for
MAX_ALTERNATIVES = 64
_NO_KEY = tl.constexpr(-(2**63))
_COLUMNS = 4096


@jit(unspecialized=("alternatives",))
def logprobs_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    maxima: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    ids_out: tl.tensor,
    values_out: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    num_groups: tl.tensor,
    alternatives: tl.tensor,
    id_bits: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    """The logprob of a row's token, then of its likeliest ones: the groups' largest keys, one taken after the other."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    group = tl.arange(0, block_groups)
    there = group < num_groups
    place = index * num_groups + group
    top = tl.load(tops + place, mask=there, other=float("-inf"))
    unknown = top != top  # noqa: PLR0124 - NaN
    highest = tl.max(tl.where(unknown, float("-inf"), top), 0)
    finite = (highest > float("-inf")) & (highest < float("inf"))
    base = tl.where(finite, highest, 0.0)
    scale = tl.exp(tl.minimum(tl.where(top > float("-inf"), top - base, float("-inf")), 0.0))
    total = tl.sum(scale * tl.load(sums + place, mask=there, other=0.0), 0)
    total = tl.where(finite, base + tl.log(tl.maximum(total, 1.0)), highest)
    total = tl.where(tl.max(unknown.to(tl.int32), 0) > 0, float("nan"), total)
    token = tl.load(tokens + index)
    out = index * (alternatives + 1)
    tl.store(ids_out + out, token.to(tl.int32))
    tl.store(values_out + out, tl.load(row + token).to(tl.float32) - total)
    # Where tokens of a group are equal, the first group's ids come first, so any id of the group will do here.
    largest = tl.load(maxima + place, mask=there, other=float("-inf"))
    keys = tl.where(there, rank_key(largest, group * GROUP, id_bits), _NO_KEY)
    for number in range(alternatives):
        pick = tl.argmax(keys, 0)
        bound = tl.max(keys, 0)
        ids = pick * GROUP + tl.arange(0, GROUP)
        values = load_values(row, ids, ids < size, 1.0)
        members = tl.where(ids < size, rank_key(values, ids, id_bits), _NO_KEY)
        found = tl.max(tl.where(members <= bound, members, _NO_KEY), 0)
        chosen = members == found
        tl.store(ids_out + out + 1 + number, tl.sum(tl.where(chosen, ids, 0), 0))
        tl.store(values_out + out + 1 + number, tl.sum(tl.where(chosen, values, 0.0), 0) - total)
        following = tl.max(tl.where(members < found, members, _NO_KEY), 0)
        keys = tl.where(group == pick, following, keys)


@jit()
def ranks_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    ranks: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Add to ``ranks`` how many ids below ``size`` of a block of a row have a larger logit than the row's token."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    ids = tl.program_id(1) * block + tl.arange(0, block)
    values = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    own = tl.load(row + tl.load(tokens + index)).to(tl.float32)
    tl.atomic_add(ranks + index, tl.sum((values > own).to(tl.int32), 0))


def logprobs(logits: Tensor, tokens: Tensor, alternatives: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of a token of each row and of the likeliest.

    Probabilities are shares of all ``vocab_size`` logits; only ids below ``size`` are listed and count for ranks.

    Args:
        logits: ``[n, vocab_size]`` float32, bfloat16 or float16; a row's elements are contiguous.
        tokens: ``[n]`` int64.
        alternatives: Likeliest tokens to list, at most ``size`` and :data:`MAX_ALTERNATIVES`.
        size: Ids to look at.

    Returns:
        ``[n, 1 + alternatives]`` int32 ids, float32 logprobs (NaN in rows that have one), the token's first, and
        ``[n]`` int32 ranks of the tokens, 1 for the likeliest.
    """
    count, vocab_size = logits.shape
    device = logits.device
    num_groups = triton.cdiv(vocab_size, noise.GROUP)
    ids = torch.empty(count, 1 + alternatives, dtype=torch.int32, device=device)
    values = torch.empty(count, 1 + alternatives, dtype=torch.float32, device=device)
    ranks = torch.ones(count, dtype=torch.int32, device=device)
    if count == 0:
        return ids, values, ranks
    scanned = torch.empty(3, count, num_groups, dtype=torch.float32, device=device)
    stride = logits.stride(0)
    group_kernel[(count, triton.cdiv(num_groups, 8))](
        logits,
        None,
        *scanned,
        stride,
        size,
        vocab_size,
        num_groups,
        divide=False,
        total=True,
        beyond=True,
        groups=8,
        num_warps=4,
    )
    logprobs_kernel[(count,)](
        logits,
        tokens,
        *scanned,
        ids,
        values,
        stride,
        size,
        num_groups,
        alternatives,
        id_bits=(vocab_size - 1).bit_length(),
        block_groups=triton.next_power_of_2(num_groups),
        num_warps=4,
    )
    ranks_kernel[(count, triton.cdiv(size, _COLUMNS))](logits, tokens, ranks, stride, size, block=_COLUMNS, num_warps=4)
    return ids, values, ranks
