"""Reproducible noise for sampling: a pure function of (seed, output position, token id).

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011): the
seed is its key, the place of the number its counter, so a number never depends on which others were drawn.

Gumbel-max sampling adds ``-log(E)`` to each token's logit, with ``E`` exponential, independent for every token, and
takes the largest sum. Drawing ``E`` for a whole vocabulary is slow, and only very small ones matter for unlikely
tokens. So they are drawn in two levels, by groups of :data:`GROUP` neighbouring ids: the smallest of ``n`` independent
exponentials is exponential with rate ``n``, sits at any of them with equal probability, and the excess of each other
one over it is again exponential (they have no memory). A group's minimum bounds all its tokens, which lets a sampler
leave out most groups without changing the outcome.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trivet_kernels.reference.exact import log

#: neighbouring token ids that share a minimum; part of the definition of the noise
GROUP = 128

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
#: last word of the counter: what the number is for
_FOR_GROUP, _FOR_TOKEN = 0, 1


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words of output for each counter.

    Args:
        counter: Four int64 tensors of numbers below 2**32, of shapes that broadcast.
        key: Two such tensors.

    Returns:
        Four int64 tensors of numbers below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product that overflows int64 still has the right bits.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def group_noise(seeds: Tensor, positions: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest exponential of each group of ids, and whose it is.

    Args:
        seeds: ``[n]`` int64, all 64 bits count.
        positions: ``[n]`` int64, position of the token in the output.
        groups: ``[n]`` int64, ``token_id // GROUP``.

    Returns:
        ``[n]`` float64, and ``[n]`` int64 below :data:`GROUP`: the member that has it.
    """
    words = _words(seeds, positions, groups, _FOR_GROUP)
    return _exponential(words[0]) / GROUP, words[1] % GROUP


def token_excess(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """``[n]`` float64: by how much a token's exponential exceeds its group's smallest, unless it is the smallest."""
    return _exponential(_words(seeds, positions, token_ids, _FOR_TOKEN)[0])


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """``[n]`` float64 standard Gumbel noise of single tokens; arguments ``[n]`` int64 as for :func:`group_noise`."""
    smallest, member = group_noise(seeds, positions, token_ids // GROUP)
    excess = token_excess(seeds, positions, token_ids)
    return -log(smallest + torch.where(member == token_ids % GROUP, 0.0, excess))


def _words(seeds: Tensor, positions: Tensor, index: Tensor, purpose: int) -> tuple[Tensor, ...]:
    zero = torch.zeros_like(index)
    return philox4x32((index, positions & _WORD, zero, zero + purpose), (seeds & _WORD, (seeds >> 32) & _WORD))


def _exponential(words: Tensor) -> Tensor:
    """Exponential numbers from 32-bit words, never 0."""
    return -log((words.double() + 0.5) / 2**32)
