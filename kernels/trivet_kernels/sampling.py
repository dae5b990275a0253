"""The steps of sampling that have an implementation of their own on some devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from trivet_kernels.reference import sampling as reference

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.cpu.sampling import NativeSampling


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


@functools.cache
def _native() -> NativeSampling | None:
    from trivet_kernels.cpu.build import library

    if (found := library()) is None:
        return None
    from trivet_kernels.cpu.sampling import NativeSampling

    return NativeSampling(found)
