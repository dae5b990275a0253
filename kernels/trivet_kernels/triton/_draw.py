"""One program draws one row's token: where min-p, top-k and top-p cut its ranking off, and the largest noisy sum."""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton._rank import (
    LOWEST,
    NO_ID,
    group_ids,
    key_value,
    load_values,
    rank_key,
    value_key,
)
from trivet_kernels.triton.compat import jit
from trivet_kernels.triton.noise import GROUP, group_noise, token_excess

#: probabilities relative to the likeliest token's are integers of this many to one, so that no order of summation
#: matters; 2**19 of them fit into 63 bits
_ONE = tl.constexpr(float(2**42))
#: groups that are read at once
_TILE = tl.constexpr(16)
#: what a sum of float32 numbers may be off by, relatively
_SLACK = tl.constexpr(1.00001)


@jit()
def _at_least_count(keys: tl.tensor, low: tl.tensor, high: tl.tensor, count: tl.tensor) -> tl.tensor:
    """The largest number from ``low`` to ``high - 1`` that at least ``count`` ``keys`` reach, or ``low``; int64."""
    while high - low > 1:
        step = high - low
        first, middle, last = low + step // 4, low + step // 2, low + step * 3 // 4
        reach1 = tl.sum((keys >= first).to(tl.int32), 0) >= count
        reach2 = tl.sum((keys >= middle).to(tl.int32), 0) >= count
        reach3 = tl.sum((keys >= last).to(tl.int32), 0) >= count
        high = tl.where(reach3, high, tl.where(reach2, last, tl.where(reach1, middle, first)))
        low = tl.where(reach3, last, tl.where(reach2, middle, tl.where(reach1, first, low)))
    return low


@jit()
def _at_least_mass(
    keys: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    highest: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    mass: tl.tensor,
) -> tl.tensor:
    """A number from ``low`` to ``high - 1`` that tokens of at least ``mass`` are certain to reach, or ``low``; int64.

    The likeliest token of a group has ``peaks``, all have ``masses``: those that reach a value ``v`` have what is left
    of it when all others have just less than ``v``.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        below = (GROUP - 1) * tl.exp(tl.minimum(key_value(middle.to(tl.int32)) - highest, 0.0))
        certain = tl.where(keys >= middle, tl.maximum(peaks, masses - below), 0.0)
        enough = tl.sum(certain, 0) >= mass
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@jit()
def _tally(
    row: tl.tensor,
    chosen: tl.tensor,
    num_chosen: tl.tensor,
    size: tl.tensor,
    temperature: tl.tensor,
    highest: tl.tensor,
    first: tl.tensor,
    middle: tl.tensor,
    last: tl.tensor,
    id_bits: tl.constexpr,
) -> tl.tensor:
    """How many tokens of the ``chosen`` groups have keys from ``first``, ``middle`` and ``last`` on, and their masses."""
    count1 = tl.zeros([_TILE, GROUP], tl.int32)
    count2 = tl.zeros([_TILE, GROUP], tl.int32)
    count3 = tl.zeros([_TILE, GROUP], tl.int32)
    mass1 = tl.zeros([_TILE, GROUP], tl.int64)
    mass2 = tl.zeros([_TILE, GROUP], tl.int64)
    mass3 = tl.zeros([_TILE, GROUP], tl.int64)
    for start in range(0, num_chosen, _TILE):
        place = start + tl.arange(0, _TILE)
        ids = group_ids(tl.load(chosen + place, mask=place < num_chosen, other=0))
        inside = (place < num_chosen)[:, None] & (ids < size)
        values = load_values(row, ids, inside, temperature)
        keys = rank_key(values, ids, id_bits)
        weights = (tl.exp(tl.minimum(values - highest, 0.0)) * _ONE).to(tl.int64)
        count1 += (inside & (keys >= first)).to(tl.int32)
        count2 += (inside & (keys >= middle)).to(tl.int32)
        count3 += (inside & (keys >= last)).to(tl.int32)
        mass1 += tl.where(inside & (keys >= first), weights, 0)
        mass2 += tl.where(inside & (keys >= middle), weights, 0)
        mass3 += tl.where(inside & (keys >= last), weights, 0)
    return (
        tl.sum(tl.sum(count1, 1), 0).to(tl.int64),
        tl.sum(tl.sum(count2, 1), 0).to(tl.int64),
        tl.sum(tl.sum(count3, 1), 0).to(tl.int64),
        tl.sum(tl.sum(mass1, 1), 0),
        tl.sum(tl.sum(mass2, 1), 0),
        tl.sum(tl.sum(mass3, 1), 0),
    )


@jit()
def _search(
    row: tl.tensor,
    chosen: tl.tensor,
    num_chosen: tl.tensor,
    size: tl.tensor,
    temperature: tl.tensor,
    highest: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    count: tl.tensor,
    mass: tl.tensor,
    wanted: tl.tensor,
    by_mass: tl.constexpr,
    id_bits: tl.constexpr,
) -> tl.tensor:
    """The largest key that tokens of a ``wanted`` count or mass reach, and the mass that they have.

    ``count`` and ``mass`` are those that reach ``low``, which is returned if nothing more does. Stops early where the
    interval has one token, whose exact key is of no consequence.
    """
    above = tl.zeros_like(count)
    while (high - low > 1) & (count - above > 1):
        step = high - low
        first, middle, last = low + step // 4, low + step // 2, low + step * 3 // 4
        count1, count2, count3, mass1, mass2, mass3 = _tally(
            row, chosen, num_chosen, size, temperature, highest, first, middle, last, id_bits
        )
        reach1 = (mass1 if by_mass else count1) >= wanted
        reach2 = (mass2 if by_mass else count2) >= wanted
        reach3 = (mass3 if by_mass else count3) >= wanted
        high = tl.where(reach3, high, tl.where(reach2, last, tl.where(reach1, middle, first)))
        above = tl.where(reach3, above, tl.where(reach2, count3, tl.where(reach1, count2, count1)))
        low = tl.where(reach3, last, tl.where(reach2, middle, tl.where(reach1, first, low)))
        count = tl.where(reach3, count3, tl.where(reach2, count2, tl.where(reach1, count1, count)))
        mass = tl.where(reach3, mass3, tl.where(reach2, mass2, tl.where(reach1, mass1, mass)))
    return low, mass


@jit()
def _cut(
    row: tl.tensor,
    group: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    chosen: tl.tensor,
    size: tl.tensor,
    num_groups: tl.tensor,
    temperature: tl.tensor,
    highest: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    total: tl.constexpr,
    id_bits: tl.constexpr,
) -> tl.tensor:
    """The key from which on tokens are kept."""
    keys = value_key(maxima).to(tl.int64)
    limit = value_key(highest).to(tl.int64) + 1
    cuts, nucleus, ratio = (top_k > 0) & (top_k < size), top_p < 1.0, log_min_p > float("-inf")
    floor = tl.zeros_like(limit) + LOWEST
    if ratio:
        bound = highest.to(tl.float64) + log_min_p
        rounded = bound.to(tl.float32)
        floor = tl.maximum(floor, value_key(rounded).to(tl.int64) + (rounded.to(tl.float64) < bound).to(tl.int64))
    # A value that all tokens to be kept are certain to have; few groups reach it.
    least = floor
    all_mass = tl.zeros_like(limit)
    if cuts:
        if top_k <= num_groups:
            least = _at_least_count(keys, floor, limit, top_k)
    elif total:
        if nucleus & (log_min_p == float("-inf")):
            peaks = tl.exp(tl.minimum(maxima - highest, 0.0))
            masses = peaks * tl.load(sums + group, mask=group < num_groups, other=0.0)
            all_mass = tl.sum((masses * _ONE).to(tl.int64), 0)
            share = (all_mass.to(tl.float64) * top_p).to(tl.float32) * (_SLACK / _ONE)
            least = _at_least_mass(keys, peaks, masses, highest, floor, limit, share)
    cut = least << id_bits
    if cuts | nucleus:
        reaches = keys >= least
        count = tl.sum(reaches.to(tl.int32), 0)
        tl.store(chosen + tl.cumsum(reaches.to(tl.int32), 0) - 1, group, mask=reaches)
        tl.debug_barrier()
        end = limit << id_bits
        tokens, _, _, mass, _, _ = _tally(
            row, chosen, count, size, temperature, highest, cut, cut, cut, id_bits
        )
        if cuts & (top_k < tokens):
            cut, mass = _search(
                row, chosen, count, size, temperature, highest, cut, end, tokens, mass, top_k, False, id_bits
            )
            tokens = top_k
        if nucleus:
            exact = (tl.where(all_mass > 0, all_mass, mass).to(tl.float64) * top_p)
            wanted = tl.maximum(tl.ceil(exact).to(tl.int64), 1)
            cut, mass = _search(
                row, chosen, count, size, temperature, highest, cut, end, tokens, mass, wanted, True, id_bits
            )
    return cut


@jit()
def _noisiest(
    row: tl.tensor,
    group: tl.tensor,
    maxima: tl.tensor,
    size: tl.tensor,
    temperature: tl.tensor,
    cut: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    id_bits: tl.constexpr,
) -> tl.tensor:
    """The token with the largest sum of value and Gumbel noise among those from ``cut`` on.

    Groups are looked into in the order of what their tokens' sums can be at most, until none can be larger."""
    smallest, member = group_noise(group, position, seed)
    alive = rank_key(maxima, group * GROUP, id_bits) >= cut
    most = tl.where(alive, maxima.to(tl.float64) - tl.log(smallest), float("-inf"))
    best = tl.max(tl.full([1], float("-inf"), tl.float64), 0)
    winner = tl.max(tl.full([1], NO_ID, tl.int32), 0)
    bound = tl.max(most, 0)
    while (bound >= best) & (bound > float("-inf")):
        pick = tl.min(tl.where(most == bound, group, NO_ID), 0)
        own = group == pick
        least = tl.sum(tl.where(own, smallest, 0.0), 0)
        holder = tl.sum(tl.where(own, member, 0), 0)
        place = tl.arange(0, GROUP)
        ids = pick * GROUP + place
        values = load_values(row, ids, ids < size, temperature)
        kept = (ids < size) & (rank_key(values, ids, id_bits) >= cut)
        noise = least + tl.where(place == holder, 0.0, token_excess(ids, position, seed))
        totals = tl.where(kept, values.to(tl.float64) - tl.log(noise), float("-inf"))
        largest = tl.max(totals, 0)
        token = tl.min(tl.where(kept & (totals == largest), ids, NO_ID), 0)
        winner = tl.where(
            largest > best, token, tl.where(largest == best, tl.minimum(token, winner), winner)
        )
        best = tl.maximum(best, largest)
        most = tl.where(own, float("-inf"), most)
        bound = tl.max(most, 0)
    return winner


@jit()
def draw_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    log_min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    chosen: tl.tensor,
    drawn: tl.tensor,
    highests: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    num_groups: tl.tensor,
    total: tl.constexpr,
    id_bits: tl.constexpr,
    block_groups: tl.constexpr,
) -> None:
    """Draw the token of a row from its logits and :func:`trivet_kernels.triton._rank.group_kernel`'s results."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    group = tl.arange(0, block_groups)
    largest = tl.load(maxima + index * num_groups + group, mask=group < num_groups, other=float("-inf"))
    bad = largest != largest
    highest = tl.max(tl.where(bad, float("-inf"), largest), 0)
    sound = (tl.max(bad.to(tl.int32), 0) == 0) & (highest > float("-inf")) & (highest < float("inf"))
    tl.store(highests + index, tl.where(tl.max(bad.to(tl.int32), 0) > 0, float("nan"), highest))
    temperature = tl.load(temperatures + index).to(tl.float32)
    token = tl.min(tl.zeros_like(group), 0)
    if sound:
        if temperature == 0.0:
            first = tl.min(tl.where(largest == highest, group, NO_ID), 0)
            ids = first * GROUP + tl.arange(0, GROUP)
            values = load_values(row, ids, ids < size, 1.0)
            token = tl.min(tl.where(values == highest, ids, NO_ID), 0)
        else:
            cut = _cut(
                row,
                group,
                largest,
                sums + index * num_groups,
                chosen + index * num_groups,
                size,
                num_groups,
                temperature,
                highest,
                tl.load(top_ks + index),
                tl.load(top_ps + index),
                tl.load(log_min_ps + index),
                total,
                id_bits,
            )
            token = _noisiest(
                row,
                group,
                largest,
                size,
                temperature,
                cut,
                tl.load(seeds + index),
                tl.load(positions + index),
                id_bits,
            )
    tl.store(drawn + index, token)
