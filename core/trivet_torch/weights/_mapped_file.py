"""A file mapped into memory, as a tensor of bytes without a copy."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from trivet.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class MappedFile:
    """``bytes`` is the whole file as uint8, read-only in fact though torch cannot express it: writing crashes.

    The mapping lives as long as this object or any view of ``bytes``.
    """

    def __init__(self, path: Path) -> None:
        """Map ``path``. Raises :class:`ModelLoadError` if it cannot be read, or is empty."""
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self._descriptor)
            self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelLoadError(f"{path}: cannot be mapped into memory ({error}); check the file") from error
        self.bytes = as_tensor(np.frombuffer(self._map, np.uint8))

    def release(self, start: int, end: int) -> None:
        """Let the pages that lie wholly within bytes ``[start, end)`` leave memory; they are read again if touched."""
        release_pages(self._map, start, end)

    def rows(self, start: int, num_rows: int, row_bytes: int, indices: Tensor) -> Tensor:
        """Rows ``indices`` ``[n]`` of the ``num_rows`` rows of ``row_bytes`` that begin at byte ``start``: new memory,
        ``[n, row_bytes]`` uint8.

        They are read, not mapped, where the system can: around every byte of a mapping that is touched the system maps
        from 64 KiB to some MiB of the file, all of which counts as this process' memory.

        Raises:
            IndexError: There is no such row.
            ModelLoadError: The file has become shorter.
        """
        wanted = indices.tolist()
        if wanted and not 0 <= min(wanted) <= max(wanted) < num_rows:
            raise IndexError(f"rows must be in [0, {num_rows}), not {min(wanted)} to {max(wanted)}")
        if not hasattr(os, "preadv"):
            return self.bytes[start : start + num_rows * row_bytes].view(num_rows, row_bytes).index_select(0, indices)
        found = np.empty((len(wanted), row_bytes), np.uint8)
        buffer = memoryview(found.reshape(-1).data)
        for index, row in enumerate(wanted):
            part = buffer[index * row_bytes : (index + 1) * row_bytes]
            if os.preadv(self._descriptor, (part,), start + row * row_bytes) != row_bytes:
                raise ModelLoadError(f"{self._path}: the file has become shorter while it is in use; restore it")
        return torch.from_numpy(found)


def as_tensor(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Tensor:
    """``[n]`` uint8, possibly read-only, as a tensor of the same memory, which keeps ``data`` alive.

    ``torch.from_numpy`` and ``torch.frombuffer`` warn about memory that is read-only, hence the detour by address.
    """
    if data.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    buffer = (ctypes.c_uint8 * data.size).from_address(data.ctypes.data)
    buffer.owner = data  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)


def release_pages(mapped: mmap.mmap, start: int, end: int) -> None:
    """Drop the pages wholly within bytes ``[start, end)`` of a read-only mapping from this process's memory.

    Nothing is lost: the pages of a mapped file that nobody wrote are read again when touched.
    """
    page = mmap.PAGESIZE
    first = -(-start // page) * page
    last = end // page * page
    if end == len(mapped):
        last = -(-end // page) * page  # nothing follows on the last page
    if last > first and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def prefetch_pages(mapped: mmap.mmap, start: int, end: int) -> None:
    """Have bytes ``[start, end)`` read ahead of their use."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first and hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED, first, end - first)
