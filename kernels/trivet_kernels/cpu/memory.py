"""Memory for packed weights."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

# The size of a huge page on x86-64 and most others.
_HUGE_PAGE = 2 << 20


def room(size: int) -> Tensor:
    """``[size]`` uint8 zeros, in huge pages as far as they fill them: weights are read from end to end in every step,
    and small pages cost a tenth of that."""
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    # Advice: a system without huge pages refuses it, and nothing is lost but time.
    with contextlib.suppress(OSError):
        area.madvise(mmap.MADV_HUGEPAGE, start, size)
    return whole[start : start + size]
