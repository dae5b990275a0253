"""One program draws one row's token: where min-p, top-k and top-p cut its ranking off, and the largest noisy sum."""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.triton._rank import (
    LOWEST,
    NO_ID,
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
#: width of a counter of tokens, of which three are packed into an integer
_COUNTER = tl.constexpr(21)
_MASK = tl.constexpr(2**21 - 1)
_NO_KEY = tl.constexpr(-(2**63))
#: how closely values are bounded, in keys: a 1/512 or 1/1024 of a value
_COARSE = tl.constexpr(2**14)
#: groups that are read at once
_TILE = tl.constexpr(16)
#: what a sum of float32 numbers may be off by, relatively
_SLACK = tl.constexpr(1.00001)


@jit()
def _packed(keys: tl.tensor, first: tl.tensor, middle: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Counters of keys from ``first``, ``middle`` and ``last`` on, in one int64, which no counts overflow."""
    return (
        (keys >= first).to(tl.int64)
        | ((keys >= middle).to(tl.int64) << _COUNTER)
        | ((keys >= last).to(tl.int64) << (2 * _COUNTER))
    )


@jit()
def _least_by_count(
    keys: tl.tensor, floor: tl.tensor, lowest: tl.tensor, limit: tl.tensor, count: tl.tensor
) -> tl.tensor:
    """A value's key, at least ``floor``, that ``count`` ``keys`` from ``lowest`` to below ``limit`` reach."""
    low, high = tl.maximum(lowest, floor), limit
    while high - low > _COARSE:
        step = high - low
        first, middle, last = low + step // 4, low + step // 2, low + step * 3 // 4
        counts = tl.sum(_packed(keys, first, middle, last))
        reach1, reach2 = (counts & _MASK) >= count, ((counts >> _COUNTER) & _MASK) >= count
        reach3 = (counts >> (2 * _COUNTER)) >= count
        high = tl.where(reach3, high, tl.where(reach2, last, tl.where(reach1, middle, first)))
        low = tl.where(reach3, last, tl.where(reach2, middle, tl.where(reach1, first, low)))
    return low


@jit()
def _certain(keys: tl.tensor, peaks: tl.tensor, masses: tl.tensor, highest: tl.tensor, key: tl.tensor) -> tl.tensor:
    """What tokens whose keys are at least ``key`` weigh at least.

    The likeliest token of a group weighs ``peaks``, all weigh ``masses``: those that reach a value weigh what is left
    when all the others have just less.
    """
    below = (GROUP - 1) * tl.exp(tl.minimum(key_value(key.to(tl.int32)) - highest, 0.0))
    return tl.sum(tl.where(keys >= key, tl.maximum(peaks, masses - below), 0.0))


@jit()
def _least_by_mass(
    keys: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    highest: tl.tensor,
    floor: tl.tensor,
    lowest: tl.tensor,
    limit: tl.tensor,
    mass: tl.tensor,
) -> tl.tensor:
    """A value's key that tokens of at least ``mass`` are certain to reach; ``floor`` if none is known."""
    low, high = tl.maximum(lowest, floor), limit
    if _certain(keys, peaks, masses, highest, low) < mass:
        low, high = floor, floor
    while high - low > _COARSE:
        middle = low + (high - low) // 2
        enough = _certain(keys, peaks, masses, highest, middle) >= mass
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
    weigh: tl.constexpr,
    id_bits: tl.constexpr,
) -> tl.tensor:
    """How many tokens of the ``chosen`` groups have keys from ``first``, ``middle`` and ``last`` on, packed, and their
    masses (0 unless ``weigh``)."""
    counts = tl.zeros([_TILE, GROUP], tl.int64)
    mass1 = tl.zeros([_TILE, GROUP], tl.int64)
    mass2 = tl.zeros([_TILE, GROUP], tl.int64)
    mass3 = tl.zeros([_TILE, GROUP], tl.int64)
    for start in range(0, num_chosen, _TILE):
        place = start + tl.arange(0, _TILE)
        ids = tl.load(chosen + place, mask=place < num_chosen, other=0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (place < num_chosen)[:, None] & (ids < size)
        values = load_values(row, ids, inside, temperature)
        keys = tl.where(inside, rank_key(values, ids, id_bits), _NO_KEY)
        counts += _packed(keys, first, middle, last)
        if weigh:
            weights = (tl.exp(tl.minimum(values - highest, 0.0)) * _ONE).to(tl.int64)
            mass1 += tl.where(keys >= first, weights, 0)
            mass2 += tl.where(keys >= middle, weights, 0)
            mass3 += tl.where(keys >= last, weights, 0)
    if weigh:
        return tl.sum(counts), tl.sum(mass1), tl.sum(mass2), tl.sum(mass3)
    none = tl.zeros_like(first)
    return tl.sum(counts), none, none, none


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
    wanted: tl.tensor,
    by_mass: tl.constexpr,
    id_bits: tl.constexpr,
) -> tl.tensor:
    """The largest key that tokens of a ``wanted`` count or mass reach.

    ``low``, which ``count`` tokens reach, is returned if nothing more does. Stops early where the interval has one
    token, whose exact key is of no consequence.
    """
    above = tl.zeros_like(count)
    while (high - low > 1) & (count - above > 1):
        step = high - low
        first, middle, last = low + step // 4, low + step // 2, low + step * 3 // 4
        counts, mass1, mass2, mass3 = _tally(
            row, chosen, num_chosen, size, temperature, highest, first, middle, last, by_mass, id_bits
        )
        count1, count2, count3 = counts & _MASK, (counts >> _COUNTER) & _MASK, counts >> (2 * _COUNTER)
        reach1 = (mass1 if by_mass else count1) >= wanted
        reach2 = (mass2 if by_mass else count2) >= wanted
        reach3 = (mass3 if by_mass else count3) >= wanted
        high = tl.where(reach3, high, tl.where(reach2, last, tl.where(reach1, middle, first)))
        above = tl.where(reach3, above, tl.where(reach2, count3, tl.where(reach1, count2, count1)))
        low = tl.where(reach3, last, tl.where(reach2, middle, tl.where(reach1, first, low)))
        count = tl.where(reach3, count3, tl.where(reach2, count2, tl.where(reach1, count1, count)))
    return low


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
    lowest = tl.min(tl.where(group < num_groups, keys, limit))
    whole = tl.zeros_like(limit)
    if cuts:
        if top_k <= num_groups:
            least = _least_by_count(keys, floor, lowest, limit, top_k)
    elif total:  # noqa: SIM102 - one is of the compilation, the other of the run
        if nucleus & (log_min_p == float("-inf")):
            peaks = tl.exp(tl.minimum(maxima - highest, 0.0))
            masses = peaks * tl.load(sums + group, mask=group < num_groups, other=0.0)
            whole = tl.sum((masses * _ONE).to(tl.int64))
            share = (whole.to(tl.float64) * top_p).to(tl.float32) * (_SLACK / _ONE)
            least = _least_by_mass(keys, peaks, masses, highest, floor, lowest, limit, share)
    cut = least << id_bits
    if cuts | nucleus:
        reaches = keys >= least
        num_chosen = tl.sum(reaches.to(tl.int32))
        tl.store(chosen + tl.cumsum(reaches.to(tl.int32), 0) - 1, group, mask=reaches)
        tl.debug_barrier()
        end = limit << id_bits
        counts, mass, _, _ = _tally(row, chosen, num_chosen, size, temperature, highest, cut, end, end, True, id_bits)
        if cuts & (top_k < counts):
            cut = _search(row, chosen, num_chosen, size, temperature, highest, cut, end, counts, top_k, False, id_bits)
            if nucleus:
                counts, mass, _, _ = _tally(
                    row, chosen, num_chosen, size, temperature, highest, cut, end, end, True, id_bits
                )
        if nucleus:
            wanted = tl.ceil(tl.where(whole > 0, whole, mass).to(tl.float64) * top_p).to(tl.int64)
            cut = _search(
                row,
                chosen,
                num_chosen,
                size,
                temperature,
                highest,
                cut,
                end,
                counts,
                tl.maximum(wanted, 1),
                True,
                id_bits,
            )
    return cut


@jit()
def _list_near(
    row: tl.tensor,
    group: tl.tensor,
    maxima: tl.tensor,
    chosen: tl.tensor,
    size: tl.tensor,
    temperature: tl.tensor,
    cut: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    id_bits: tl.constexpr,
) -> tl.tensor:
    """List the groups in which the largest sum of value and Gumbel noise, of tokens from ``cut`` on, can be.

    The tokens with the most noise in their groups say what that sum is at least; a group's largest value and most
    noise, whether it can reach that. Returns how many groups are in ``chosen``.
    """
    smallest, member = group_noise(group, position, seed)
    alive = rank_key(maxima, group * GROUP, id_bits) >= cut
    reach = -tl.log(smallest)
    holders = group * GROUP + member
    alive_holders = alive & (holders < size)
    values = load_values(row, holders, alive_holders, temperature)
    kept = alive_holders & (rank_key(values, holders, id_bits) >= cut)
    known = tl.max(tl.where(kept, values.to(tl.float64) + reach, float("-inf")), 0)
    near = alive & (maxima.to(tl.float64) + reach >= known)
    num_near = tl.sum(near.to(tl.int32))
    tl.debug_barrier()  # the last list has been read
    tl.store(chosen + tl.cumsum(near.to(tl.int32), 0) - 1, group, mask=near)
    tl.debug_barrier()
    return num_near


@jit()
def _noisiest(
    row: tl.tensor,
    chosen: tl.tensor,
    num_chosen: tl.tensor,
    size: tl.tensor,
    temperature: tl.tensor,
    cut: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    id_bits: tl.constexpr,
) -> tl.tensor:
    """The token with the largest sum of value and Gumbel noise of those from ``cut`` on in the ``chosen`` groups."""
    best = tl.max(tl.full([1], float("-inf"), tl.float64), 0)
    winner = tl.max(tl.full([1], NO_ID, tl.int32), 0)
    for start in range(0, num_chosen, _TILE):
        place = start + tl.arange(0, _TILE)
        groups = tl.load(chosen + place, mask=place < num_chosen, other=0)
        ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (place < num_chosen)[:, None] & (ids < size)
        values = load_values(row, ids, inside, temperature)
        kept = inside & (rank_key(values, ids, id_bits) >= cut)
        smallest, member = group_noise(groups, position, seed)
        excess = token_excess(ids, position, seed)
        noise = smallest[:, None] + tl.where(member[:, None] == ids % GROUP, 0.0, excess)
        totals = tl.where(kept, values.to(tl.float64) - tl.log(noise), float("-inf"))
        largest = tl.max(totals)
        token = tl.min(tl.where(kept & (totals == largest), ids, NO_ID))
        # Tiles are in the order of ids, so an equal sum in a later one does not count.
        winner = tl.where(largest > best, token, winner)
        best = tl.maximum(best, largest)
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
    bad = largest != largest  # noqa: PLR0124 - NaN
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
            seed, position = tl.load(seeds + index), tl.load(positions + index)
            listed = chosen + index * num_groups
            num_near = _list_near(row, group, largest, listed, size, temperature, cut, seed, position, id_bits)
            token = _noisiest(row, listed, num_near, size, temperature, cut, seed, position, id_bits)
    tl.store(drawn + index, token)
