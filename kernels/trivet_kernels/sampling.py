"""The steps of sampling that have an implementation of their own on some devices."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trivet_kernels.reference import sampling as reference

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.cpu.sampling import NativeSampling

#: largest vocabulary that the fused kernels take
_MAX_FUSED = 1 << 19


def argmax(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest logit of each row among the first ``size`` ids, in the dtype they have, without a copy.

    Args:
        logits: ``[n, vocab_size]``.
        size: Ids to look at.

    Returns:
        ``[n]`` int64 ids, the lowest of equals (a NaN counts as largest), and ``[n]`` their logits.
    """
    native = _native() if logits.is_cpu else None
    return reference.argmax(logits, size) if native is None else native.argmax(logits, size)


def fused(logits: Tensor) -> bool:
    """Whether :mod:`trivet_kernels.triton.sampling` and :mod:`trivet_kernels.triton.logprobs` serve these logits."""
    return logits.is_cuda and logits.shape[1] <= _MAX_FUSED and _has_triton()


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens whose bit is not set to -inf, in place.

    Args:
        logits: ``[n, vocab_size]``.
        bitmask: ``[n, ceil(vocab_size / 32)]`` int32, bit ``t % 32`` of word ``t // 32`` for token ``t``.
    """
    if fused(logits):
        from trivet_kernels.triton import logits as triton_logits

        triton_logits.apply_bitmask(logits, bitmask)
    else:
        reference.apply_bitmask(logits, bitmask)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _native() -> NativeSampling | None:
    from trivet_kernels.cpu.build import library

    if (found := library()) is None:
        return None
    from trivet_kernels.cpu.sampling import NativeSampling

    return NativeSampling(found)
