"""Drawing tokens from logits: temperature, min-p, top-k and top-p over rows with parameters of their own.

Tokens are ranked by value, equal ones by id, so every cut is exact and the most likely token is what greedy decoding
takes. A row's outcome depends on its own numbers only. What takes long is done on the largest values of groups of ids
first: a vocabulary is scanned once for them, and sorting, gathering and noise are for the few groups that matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trivet_kernels.reference.exact import log, weights
from trivet_kernels.reference.noise import GROUP, group_noise, gumbel_noise, token_excess

#: largest prefixes of the ranking that are looked up by groups; longer ones are sorted out of the whole row
_PREFIXES = (32, 128, 512)
#: where top-p's cut is not among the likeliest tokens it is sought in bins of probability: how many, and their width
_BINS, _BIN_WIDTH = 4096, 1 / 128
_LOWEST = torch.finfo(torch.float32).min
_NO_ID = 2**31 - 1


class GroupedLogits(NamedTuple):
    """Float32 logits with the largest of each group of ids.

    ``values`` ``[n, num_groups * GROUP]`` are padded with -inf; ``maxima`` ``[n, num_groups]``.
    """

    values: Tensor
    maxima: Tensor

    @property
    def highest(self) -> Tensor:
        """``[n]`` largest logit of each row, NaN if the row has one."""
        return self.maxima.amax(1)

    def groups(self, rows: Tensor, groups: Tensor) -> Tensor:
        """``[..., GROUP]`` values of single groups, for index tensors that broadcast."""
        return self.values.view(len(self.values), -1, GROUP)[rows, groups]


def grouped(logits: Tensor, size: int) -> GroupedLogits:
    """A float32 copy of the first ``size`` ids of ``logits`` ``[n, vocab_size]``, by groups."""
    count = -(-size // GROUP)
    values = torch.empty(len(logits), count * GROUP, dtype=torch.float32, device=logits.device)
    values[:, :size] = logits[:, :size]
    values[:, size:] = -torch.inf
    return GroupedLogits(values, values.view(len(values), count, GROUP).amax(2))


def argmax(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest logit of each row among the first ``size`` ids, in the dtype they have, without a copy.

    Args:
        logits: ``[n, vocab_size]``.
        size: Ids to look at.

    Returns:
        ``[n]`` int64 ids, the lowest of equals (a NaN counts as largest), and ``[n]`` their logits.
    """
    count = size // GROUP
    rows = torch.arange(len(logits), device=logits.device)
    # PyTorch's amax is several times faster than its argmax, so that only looks at one group.
    if count == 0:
        ids = logits[:, :size].argmax(1)
        return ids, logits[rows, ids]
    groups = logits[:, : count * GROUP].view(len(logits), count, GROUP)
    best = groups.amax(2).argmax(1)
    ids = best * GROUP + groups[rows, best].argmax(1)
    values = logits[rows, ids]
    if count * GROUP < size:
        tail = logits[:, count * GROUP : size]
        tail_ids = tail.argmax(1)
        tail_values = tail[rows, tail_ids]
        later = (tail_values > values) | (tail_values.isnan() & ~values.isnan())
        ids = torch.where(later, tail_ids + count * GROUP, ids)
        values = torch.where(later, tail_values, values)
    return ids, values


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens whose bit is not set to -inf, in place.

    Args:
        logits: ``[n, vocab_size]``.
        bitmask: ``[n, ceil(vocab_size / 32)]`` int32, bit ``t % 32`` of word ``t // 32`` for token ``t``.
    """
    constrained = (bitmask != -1).any(1).nonzero()[:, 0]
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    for row in constrained.tolist():
        bits = (bitmask[row][:, None] >> shifts) & 1
        logits[row].masked_fill_(bits.flatten()[: logits.shape[1]] == 0, -torch.inf)


def top(logits: GroupedLogits, count: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The ``count`` first tokens of the ranking of some ``rows`` ``[m]`` int64 (None: all).

    Returns ``[m, count]`` values and ids (int64), the likeliest first. ``count`` must not exceed the padded number of
    ids.
    """
    num_groups = logits.maxima.shape[1]
    if rows is None:
        rows = torch.arange(len(logits.maxima), device=logits.maxima.device)
    if count >= num_groups // 2:
        values, ids = logits.values[rows].sort(dim=1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    # The first `count` tokens are in the `count` groups whose largest values come first, and none is below the last of
    # these.
    maxima = logits.maxima[rows]
    groups = torch.arange(num_groups, device=rows.device).expand(len(rows), -1)
    groups = groups.gather(1, _rank_keys(maxima, groups).topk(count, 1).indices)
    values = logits.groups(rows[:, None], groups)
    row, group, place = (values >= maxima.gather(1, groups[:, -1:])[:, :, None]).nonzero().unbind(1)
    counts = row.bincount(minlength=len(rows))
    column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    shape = len(rows), max(count, int(counts.max()))
    near = torch.full(shape, -torch.inf, device=row.device)
    ids = torch.full(shape, _NO_ID, device=row.device)
    near[row, column] = values[row, group, place]
    ids[row, column] = groups[row, group] * GROUP + place
    order = _rank_keys(near, ids).topk(count, 1).indices
    return near.gather(1, order), ids.gather(1, order)


def sample(
    logits: Tensor,
    size: int,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Divide rows by their temperatures, cut them and draw a token from each.

    Args:
        logits: ``[n, vocab_size]``, any dtype, not changed.
        size: Ids that may be drawn.
        temperature: ``[n]`` float32, above 0.
        top_k: As :func:`survivors` takes it; and so ``top_p`` and ``min_p``.
        top_p: ``[n]`` float64.
        min_p: ``[n]`` float64.
        seeds: ``[n]`` int64.
        positions: ``[n]`` int64.

    Returns:
        ``[n]`` int64 ids, 0 where the largest logit is not finite, and ``[n]`` float32 the largest logits, divided.
    """
    block = grouped(logits, size)
    # Division keeps the order, so the largest stay the largest.
    block.values.div_(temperature[:, None])
    block.maxima.div_(temperature[:, None])
    highest = block.highest
    ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    sound = highest.isfinite().nonzero()[:, 0]
    if len(sound):
        block = GroupedLogits(block.values[sound], block.maxima[sound])
        cut = survivors(block, top_k[sound], top_p[sound], min_p[sound])
        ids[sound] = draw(block, *cut, seeds[sound], positions[sound])
    return ids, highest


def logprobs(logits: Tensor, tokens: Tensor, count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities ``[n]`` of ``tokens`` and of the ``count`` most likely ones, see
    :func:`trivet_kernels.sampling.logprobs`, for logits ``[n, vocab_size]`` of any dtype."""
    logits = logits.float()
    total = logits.logsumexp(1, keepdim=True)
    ids = tokens[:, None]
    chosen = logits.gather(1, ids)
    ahead = (logits[:, :size] > chosen).sum(1)
    values = chosen
    if count > 0:
        likeliest, likeliest_ids = top(grouped(logits, size), count)
        ids, values = torch.cat([ids, likeliest_ids], 1), torch.cat([chosen, likeliest], 1)
    return ids.int(), values - total, (ahead + 1).int()


def survivors(logits: GroupedLogits, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Where min-p, then top-k, then top-p cut the ranking of each row off.

    Min-p keeps tokens at least ``min_p`` times as likely as the likeliest; top-k the first ``top_k`` of those; top-p
    the fewest first of those whose share of what the others left is at least ``top_p``. The likeliest token is always
    kept.

    Args:
        logits: Rows without NaN whose largest value is finite, already divided by the temperature.
        top_k: ``[n]`` int64, 0 keeps all.
        top_p: ``[n]`` float64, above 0; 1 keeps all.
        min_p: ``[n]`` float64 below 1, 0 keeps all.

    Returns:
        ``[n]`` float32 value and ``[n]`` int64 id of the last token kept, in the order of :func:`top`. The id is that
        of no token if all of that value are kept.
    """
    size, highest = logits.values.shape[1], logits.highest
    floor = torch.where(min_p > 0, _at_least(highest.double() + min_p.log()), _LOWEST)
    least, last = floor.clone(), torch.full_like(top_k, _NO_ID)
    nucleus, cut = top_p < 1, (top_k > 0) & (top_k < size)
    need = torch.where(cut, top_k, torch.where(nucleus, _PREFIXES[1], 0))
    shorter = 0
    for length in (*(prefix for prefix in _PREFIXES if prefix < size), size):
        chosen = ((need > shorter) & (need <= length)).nonzero()[:, 0]
        shorter = length
        if not len(chosen):
            continue
        values, ids = top(logits, length, chosen)
        rank = torch.arange(length, device=values.device)
        kept = (values >= floor[chosen, None]) & ((rank < top_k[chosen, None]) | ~cut[chosen, None])
        within = (weights(values - highest[chosen, None]) * kept).cumsum(1)
        endless = (nucleus & ~cut)[chosen].nonzero()[:, 0].tolist() if length < size else []
        total = within[:, -1].clone()
        for index in endless:
            total[index] = _masses(logits.values[chosen[index]], floor[chosen[index]]).sum()
        share = (top_p[chosen] * total.double()).ceil().long()[:, None]
        before = torch.cat([torch.zeros_like(share), within[:, :-1]], 1)
        kept &= (before < share) | ~nucleus[chosen, None]
        final = kept.sum(1, keepdim=True) - 1
        least[chosen], last[chosen] = values.gather(1, final)[:, 0], ids.gather(1, final)[:, 0]
        for index in endless:
            if kept[index, -1] and within[index, -1] < share[index, 0]:
                row = chosen[index]
                least[row], last[row] = _distant_cut(logits.values[row], floor[row], top_p[row])
    return least, last


def draw(logits: GroupedLogits, least: Tensor, last: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each row by Gumbel-max: the largest sum of a logit and the noise of its token.

    Args:
        logits: Rows without NaN whose largest value is finite, already divided by the temperature.
        least: ``[n]`` as :func:`survivors` returns it.
        last: ``[n]`` likewise.
        seeds: ``[n]`` int64.
        positions: ``[n]`` int64, position of the token in the output.

    Returns:
        ``[n]`` int64 ids.
    """
    rows, groups = (logits.maxima >= least[:, None]).nonzero().unbind(1)
    smallest, member = group_noise(seeds[rows], positions[rows], groups)
    reach = -log(smallest)  # no token of the group has more noise
    # What the largest sum is at least: the likeliest token's, and those of the tokens with the most noise in their
    # groups.
    token = groups * GROUP + member
    value = logits.values[rows, token]
    sums = torch.where(_survives(value, token, least[rows], last[rows]), value.double() + reach, -torch.inf)
    likeliest, value = argmax(logits.values, logits.values.shape[1])
    best = (value.double() + gumbel_noise(seeds, positions, likeliest)).scatter_reduce(0, rows, sums, "amax")
    # Any token that can reach it.
    near = logits.maxima[rows, groups].double() + reach >= best[rows]
    rows, groups, smallest, member, reach = (x[near] for x in (rows, groups, smallest, member, reach))
    values = logits.groups(rows, groups)
    ids = groups[:, None] * GROUP + torch.arange(GROUP, device=groups.device)
    near = values.double() + reach[:, None] >= best[rows, None]
    pair, place = (near & _survives(values, ids, least[rows, None], last[rows, None])).nonzero().unbind(1)
    rows, ids, values = rows[pair], ids[pair, place], values[pair, place]
    excess = token_excess(seeds[rows], positions[rows], ids)
    sums = values.double() - log(smallest[pair] + torch.where(member[pair] == place, 0.0, excess))
    best = best.scatter_reduce(0, rows, sums, "amax")
    winners = torch.where(sums == best[rows], ids, _NO_ID)
    return torch.full_like(seeds, _NO_ID).scatter_reduce(0, rows, winners, "amin")


def _rank_keys(values: Tensor, ids: Tensor) -> Tensor:
    """Int64 keys that order float32 values, equal ones by ascending id below 2**31."""
    bits = (values + 0.0).view(torch.int32)  # the sum turns -0.0, which equals 0.0, into it
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (_NO_ID - ids)


def _survives(values: Tensor, ids: Tensor, least: Tensor, last: Tensor) -> Tensor:
    return (values > least) | ((values == least) & (ids <= last))


def _at_least(bound: Tensor) -> Tensor:
    """The smallest float32 numbers that are not below float64 ``bound``."""
    rounded = bound.float()
    return torch.where(rounded.double() < bound, torch.nextafter(rounded, torch.tensor(torch.inf)), rounded)


def _masses(values: Tensor, floor: Tensor) -> Tensor:
    """Weights of one row's tokens; 0 for those below ``floor``."""
    return weights(values - values.amax()).masked_fill_(values < floor, 0)


def _distant_cut(values: Tensor, floor: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``share`` of all probability is reached, going down a row's ranking: value and id of the last one kept."""
    masses = _masses(values, floor)
    distance = (values.amax() - values).div_(_BIN_WIDTH).clamp_(max=_BINS - 1).long()
    within = masses.new_zeros(_BINS).scatter_add_(0, distance, masses).cumsum(0)
    target = (share * within[-1].double()).ceil().long()
    number = torch.searchsorted(within, target)
    members = (distance == number).nonzero()[:, 0]
    order = values[members].sort(descending=True, stable=True).indices
    reached = within[number] - masses[members].sum() + masses[members[order]].cumsum(0)
    final = members[order[int((reached < target).sum().clamp(max=len(members) - 1))]]
    return values[final], final
