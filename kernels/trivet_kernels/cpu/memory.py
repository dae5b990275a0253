"""Memory for packed weights, in huge pages: they are read from end to end in every step, and small pages cost a fifth
of the speed, since neither the translation of addresses nor the processor's prefetching goes beyond a page quickly."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

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
    """Memory that matrices take their parts of, one after the other; their tensors keep it alive, and nothing else."""

    def __init__(self, area: mmap.mmap, size: int) -> None:
        """``area`` has at least ``size`` bytes and the rest of a huge page in front of them."""
        self._memory = weakref.ref(area)
        self._next = -torch.frombuffer(area, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
        self._end = self._next + size
        # Advice: a system without huge pages refuses it, and nothing is lost but time.
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE, self._next, size)

    def take(self, size: int) -> Tensor | None:
        """``[size]`` zeros, None if there is less, or no matrix any more that keeps the memory."""
        memory = self._memory()
        if memory is None or size > self._end - self._next:
            return None
        part = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=self._next)
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
        return part


class _Areas:
    """The area that small matrices take their parts of at present."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: _Area | None = None

    def take(self, size: int) -> Tensor:
        """``[size]`` zeros; raises OSError if the system does not give an area."""
        if size >= _SHARED:
            return self._first(size, -(-size // _HUGE_PAGE) * _HUGE_PAGE)[0]
        with self._lock:
            part = None if self._shared is None else self._shared.take(size)
            if part is None:
                part, self._shared = self._first(size, _SHARED)
            return part

    @staticmethod
    def _first(size: int, whole: int) -> tuple[Tensor, _Area]:
        """The first part of a new area."""
        memory = mmap.mmap(-1, whole + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area = _Area(memory, whole)
        part = area.take(size)
        assert part is not None
        return part, area


_areas = _Areas()


def room(size: int) -> Tensor:
    """``[size]`` uint8 zeros, in huge pages where the system has them; several threads may ask at once."""
    if size < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    try:
        return _areas.take(size)
    except OSError:  # so much address space is more than a limit leaves; what is asked for may be less
        return torch.zeros(size, dtype=torch.uint8)
