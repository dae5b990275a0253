"""Tokens in the order of their ranking: by value, equal ones by id, as one integer each; and scans of a row by groups.

A vocabulary is read once, by :func:`group_kernel`, for the largest value of each group of ids; what follows reads only
the groups that can matter.
"""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton.compat import jit
from trivet_kernels.triton.noise import GROUP

#: key of the lowest finite number: nothing with a key below it, which -inf has, is ever drawn
LOWEST = tl.constexpr(-2139095040)
#: an id that no token has
NO_ID = tl.constexpr(2**31 - 1)


@jit()
def value_key(values: tl.tensor) -> tl.tensor:
    """Int32 that orders float32 ``values``; 0.0 and -0.0 have the same."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def key_value(key: tl.tensor) -> tl.tensor:
    """The float32 that has an int32 ``key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def rank_key(values: tl.tensor, ids: tl.tensor, id_bits: tl.constexpr) -> tl.tensor:
    """Int64 that orders tokens: the likeliest has the largest, no two have the same."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << id_bits) + ((1 << id_bits) - 1 - ids)


@jit()
def group_ids(groups: tl.tensor) -> tl.tensor:
    """``[g, GROUP]`` ids of ``groups`` ``[g]``."""
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@jit()
def load_values(row: tl.tensor, ids: tl.tensor, inside: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits divided by the temperature in float32, rounded as IEEE 754 asks; -inf where not ``inside``."""
    values = tl.load(row + ids, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(values, temperature)


@jit()
def group_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    maxima: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    divide: tl.constexpr,
    total: tl.constexpr,
    beyond: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    """What rows ``[n]`` and groups ``[num_groups]`` hold, of ids below ``size``; a program takes ``groups`` of a row.

    ``maxima`` ``[n, num_groups]``: the largest value, NaN if there is one. With ``total``, ``sums``: the sum of the
    exponentials of all values less the largest. With ``beyond`` these sums are over ids below ``vocab_size``, whose
    largest value goes to ``tops``. Values are divided by float64 ``temperatures`` (0 stands for 1) if ``divide``.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    ids = group_ids(group)
    temperature = 1.0
    if divide:
        temperature = tl.load(temperatures + row).to(tl.float32)
        temperature = tl.where(temperature == 0.0, 1.0, temperature)
    end = vocab_size if beyond else size
    values = load_values(logits + row * row_stride, ids, ids < end, temperature)
    place = row * num_groups + group
    there = group < num_groups
    bad = values != values  # noqa: PLR0124 - NaN
    comparable = tl.where(bad, float("-inf"), values)
    any_bad = tl.max(bad.to(tl.int32), 1) > 0
    top = tl.max(comparable, 1)
    if beyond:
        listed = tl.max(tl.where(ids < size, comparable, float("-inf")), 1)
        tl.store(tops + place, tl.where(any_bad, float("nan"), top), mask=there)
        tl.store(maxima + place, listed, mask=there)
    else:
        tl.store(maxima + place, tl.where(any_bad, float("nan"), top), mask=there)
    if total:
        base = tl.where((top == float("-inf")) | (top == float("inf")), 0.0, top)
        weights = tl.exp(tl.minimum(comparable - base[:, None], 0.0))
        tl.store(sums + place, tl.sum(weights, 1), mask=there)
