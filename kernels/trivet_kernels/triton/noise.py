"""The noise of :mod:`trivet_kernels.reference.noise` in kernels: the same words, and exponentials in float64.

Philox gives the very same bits. The logarithms are the device's, which may differ from the CPU's in the last of 53
bits: a draw can only differ where two sums of a logit and its noise are equal to 15 digits.
"""

from __future__ import annotations

import triton.language as tl

from trivet_kernels.reference import noise
from trivet_kernels.triton.compat import jit

GROUP = tl.constexpr(noise.GROUP)
_FOR_GROUP = tl.constexpr(0)
_FOR_TOKEN = tl.constexpr(1)


@jit()
def philox(index: tl.tensor, position: tl.tensor, seed: tl.tensor, purpose: tl.constexpr) -> tl.tensor:
    """The first two words of Philox4x32-10 for each ``index`` (int32), as uint32."""
    c0 = index.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0) + purpose
    k0 = tl.zeros_like(c0) + seed.to(tl.uint32)
    k1 = tl.zeros_like(c0) + (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1


@jit()
def exponential(word: tl.tensor) -> tl.tensor:
    """Float64 exponential numbers from uint32 words, never 0."""
    return -tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10)  # 2 ** -32


@jit()
def group_noise(group: tl.tensor, position: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """The smallest exponential of each group of ids, and the member that has it (int32)."""
    word, place = philox(group, position, seed, _FOR_GROUP)
    return exponential(word) / GROUP, (place % GROUP).to(tl.int32)


@jit()
def token_excess(token: tl.tensor, position: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """By how much a token's exponential exceeds its group's smallest, unless it is the smallest."""
    word, _ = philox(token, position, seed, _FOR_TOKEN)
    return exponential(word)
