"""Changing logits on a GPU in place: masks, biases and penalties, one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from trivet_kernels.triton.compat import jit

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.reference.logits import SparseTokens

_WORDS = 32
_TOKENS = 128


@jit(unspecialized=("num_words",))
def bitmask_kernel(
    logits: tl.tensor,
    bitmask: tl.tensor,
    logits_row_stride: tl.tensor,
    bitmask_row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_words: tl.tensor,
    words: tl.constexpr,
) -> None:
    """Write -inf where a bit is 0; nothing is read but the mask, and nothing written where it allows all."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * words + tl.arange(0, words)
    mask = tl.load(bitmask + row * bitmask_row_stride + word, mask=word < num_words, other=-1)
    if tl.max((mask != -1).to(tl.int32), 0) > 0:
        bit = tl.arange(0, 32)
        ids = word[:, None] * 32 + bit[None, :]
        forbidden = ((mask[:, None] >> bit[None, :]) & 1) == 0
        values = tl.full([words, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row * logits_row_stride + ids, values, mask=forbidden & (ids < vocab_size))


@jit()
def bias_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    offsets: tl.tensor,
    ids: tl.tensor,
    bias: tl.tensor,
    row_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Add biases to some tokens of a row."""
    index = tl.program_id(0)
    start, end = tl.load(offsets + index), tl.load(offsets + index + 1)
    place = start + tl.program_id(1) * block + tl.arange(0, block)
    inside = place < end
    at = logits + tl.load(rows + index) * row_stride + tl.load(ids + place, mask=inside, other=0)
    values = tl.load(at, mask=inside, other=0.0) + tl.load(bias + place, mask=inside, other=0.0)
    tl.store(at, values, mask=inside)


@jit()
def penalty_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    offsets: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    repetitions: tl.tensor,
    frequencies: tl.tensor,
    presences: tl.tensor,
    row_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Penalise some tokens of a row."""
    index = tl.program_id(0)
    start, end = tl.load(offsets + index), tl.load(offsets + index + 1)
    place = start + tl.program_id(1) * block + tl.arange(0, block)
    inside = place < end
    repetition = tl.load(repetitions + index)
    frequency, presence = tl.load(frequencies + index), tl.load(presences + index)
    at = logits + tl.load(rows + index) * row_stride + tl.load(ids + place, mask=inside, other=0)
    values = tl.load(at, mask=inside, other=0.0)
    count = tl.load(counts + place, mask=inside, other=0)
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = values - frequency * count.to(tl.float32)
    values = values - tl.where(count > 0, presence, 0.0)
    tl.store(at, values, mask=inside)


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """:func:`trivet_kernels.reference.sampling.apply_bitmask`, for float32, bfloat16 and float16 logits."""
    if logits.numel():
        num_words = bitmask.shape[1]
        bitmask_kernel[(len(logits), triton.cdiv(num_words, _WORDS))](
            logits,
            bitmask,
            logits.stride(0),
            bitmask.stride(0),
            logits.shape[1],
            num_words,
            words=_WORDS,
            num_warps=4,
        )


def add_bias(logits: Tensor, tokens: SparseTokens, bias: Tensor) -> None:
    """:func:`trivet_kernels.reference.logits.add_bias`."""
    if tokens.most:
        bias_kernel[(len(tokens.rows), triton.cdiv(tokens.most, _TOKENS))](
            logits, tokens.rows, tokens.offsets, tokens.ids, bias, logits.stride(0), block=_TOKENS, num_warps=1
        )


def apply_penalties(
    logits: Tensor, tokens: SparseTokens, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """:func:`trivet_kernels.reference.logits.apply_penalties`."""
    if tokens.most:
        penalty_kernel[(len(tokens.rows), triton.cdiv(tokens.most, _TOKENS))](
            logits,
            tokens.rows,
            tokens.offsets,
            tokens.ids,
            counts,
            repetition,
            frequency,
            presence,
            logits.stride(0),
            block=_TOKENS,
            num_warps=1,
        )
