"""Memory for packed weights, in huge pages: they are read from end to end in every step, and small pages cost a fifth
of the speed, since neither the translation of addresses nor the processor's prefetching goes beyond a page quickly."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

# The size of a huge page on x86-64 and most others.
_HUGE_PAGE = 2 << 20
# What smaller matrices share: many, since the last page is seldom full. Pages that are never written take no memory.
_SHARED = 256 * _HUGE_PAGE
# Less is not worth a place in it.
_SMALL = 32 << 10
_ALIGNMENT = 64


class _Area:
    """Memory that matrices take their parts of, one after the other; it lives as long as one of them."""

    def __init__(self, size: int) -> None:
        area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(area, dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE_PAGE
        # Advice: a system without huge pages refuses it, and nothing is lost but time.
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE, start, size)
        self._free = whole[start : start + size]

    def take(self, size: int) -> Tensor | None:
        """``[size]`` zeros, None if there is less."""
        if size > len(self._free):
            return None
        part, self._free = self._free[:size], self._free[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return part


class _Areas:
    """The area that small matrices take their parts of at present."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: _Area | None = None

    def take(self, size: int) -> Tensor:
        if size >= _SHARED:
            part = _Area(-(-size // _HUGE_PAGE) * _HUGE_PAGE).take(size)
            assert part is not None
            return part
        with self._lock:
            part = None if self._shared is None else self._shared.take(size)
            if part is None:
                self._shared = _Area(_SHARED)
                part = self._shared.take(size)
            assert part is not None
            return part


_areas = _Areas()


def room(size: int) -> Tensor:
    """``[size]`` uint8 zeros, in huge pages where the system has them; several threads may ask at once."""
    if size < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    return _areas.take(size)
