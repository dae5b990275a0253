"""Giving memory back to the system that this process does not need any more."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

# See madvise(2) of Linux.
_MADV_DONTNEED = 4
# What is mapped into this process; with what of it is in memory (Linux).
_MAPS, _DETAILED_MAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")
# Parameters of mallopt(3) of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# While a model is loaded, blocks of this size come from the system one by one and go back to it when they are freed.
_LOADING_BYTES = 1 << 20
# Afterwards what glibc's own adaptation ends at once a large block has been freed: activations come and go in every
# layer, and new pages for each would cost time.
_SERVING_BYTES, _SERVING_TRIM_BYTES = 32 << 20, 64 << 20
# Whoever sets one of these has chosen for himself.
_SETTINGS = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_MAX_",
)


def trim() -> None:
    """Have the C library give freed memory back that it keeps for later, where it can (glibc)."""
    release = getattr(_libc(), "malloc_trim", None)
    if release is not None:
        release(0)


def release_code() -> None:
    """Let the code of shared libraries leave this process' memory (Linux); what runs again comes back from the system's
    cache of files, in a fraction of a millisecond per MiB.

    Most of the 70 MiB of torch's code that importing it has touched registers operators, and never runs again. Only
    executable pages that cannot be written are let go of: nobody has changed those.
    """
    if _MAPS.is_file():
        _release(libraries_code(_MAPS.read_text()))


def release_libraries() -> None:
    """As :func:`release_code`, with data of shared libraries that cannot be written and never was, such as tables of
    symbols. Finding out takes the system tens of milliseconds."""
    if _DETAILED_MAPS.is_file():
        _release(unchanged_libraries(_DETAILED_MAPS.read_text()))


def _release(spans: list[tuple[int, int]]) -> None:
    madvise = getattr(_libc(), "madvise", None)
    if madvise is not None:
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in spans:
            madvise(start, end - start, _MADV_DONTNEED)


def libraries_code(maps: str) -> list[tuple[int, int]]:
    """First address and end of the executable mappings of shared libraries that cannot be written, from the text of
    ``/proc/PID/maps``."""
    return [span for line in maps.splitlines() if "r-xp" in line and (span := _library(line)) is not None]


def unchanged_libraries(maps: str) -> list[tuple[int, int]]:
    """First address and end of the mappings of shared libraries that are in memory, cannot be written and hold nothing
    but the file's own bytes (the linker has filled in some), from the text of ``/proc/PID/smaps``."""
    found: list[tuple[int, int]] = []
    span: tuple[int, int] | None = None
    sizes: dict[str, int] = {}
    for line in maps.splitlines():
        name, colon, value = line.partition(":")
        if not colon or " " in name:
            span = _library(line)
        elif value.endswith(" kB"):
            sizes[name] = int(value[:-3])
        elif name == "VmFlags" and span is not None and sizes["Rss"] and not sizes["Anonymous"] + sizes["Swap"]:
            found.append(span)
    return found


def _library(line: str) -> tuple[int, int] | None:
    """First address and end of a mapping, from its line in ``/proc/PID/maps``; None if it can be written, or is none of
    a shared library."""
    addresses, access, _, _, inode, *path = line.split(maxsplit=5)
    if access[1] == "w" or inode == "0" or not path or ".so" not in path[0].rpartition("/")[2]:
        return None
    begin, end = addresses.split("-")
    return int(begin, 16), int(end, 16)


class Pages:
    """Memory from the system for itself: ``bytes`` ``[num_bytes]`` uint8, zeros at first. A page is handed out when it
    is first written, and all go back when the last tensor of it is gone. What lies on the heap takes pages that others
    have left behind, and keeps those around it."""

    def __init__(self, num_bytes: int) -> None:
        # By default it would be shared with child processes.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        self._map = mmap.mmap(-1, max(num_bytes, 1), **private)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes) if num_bytes else _NO_BYTES

    def release(self) -> None:
        """Give the pages back, and lose what is in them; those that are written again come anew."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Kept:
    """Memory for a result of every step, on the CPU. It is used again as soon as no tensor of it is left, so whoever
    keeps a result keeps what is in it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._user: weakref.ref[Any] | None = None

    def get(self, rows: int, columns: int) -> Tensor:
        """``[rows, columns]``, contiguous, with whatever was in it."""
        count = rows * columns * self._dtype.itemsize
        if not count:
            return torch.empty(rows, columns, dtype=self._dtype)
        if count > len(self._memory) or self._is_used:
            # The next larger result finds room; pages that are never written take no memory.
            self._memory = Pages(1 << (count - 1).bit_length()).bytes.numpy()
        part = self._memory[:count]
        self._user = weakref.ref(part)
        return torch.from_numpy(part).view(self._dtype).view(rows, columns)

    def release(self) -> None:
        """Give the memory back, if no result is in it any more."""
        if not self._is_used:
            self._memory = np.empty(0, np.uint8)

    @property
    def _is_used(self) -> bool:
        return self._user is not None and self._user() is not None


class Trimmer:
    """Gives back, now and then, what steps do not need any more: freed memory, and code that has run.

    Results of a step come from the heap, between the small objects of the engine that stay. So what one step leaves
    free is not always what the next one needs, and the heap grows although no more of it is in use than before. A
    product of a new shape has the library generate code for it, and with that run megabytes of its own that may not run
    again. Both cost a step some milliseconds to get back: it is done before and within steps of many tokens, which take
    far longer, and of the memory once in many small ones.
    """

    #: tokens that make a step a long one
    MANY_TOKENS = 256
    #: small steps between two times
    EVERY = 64

    def __init__(self) -> None:
        self._steps = 0

    def begins(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` begins."""
        self._steps += 1
        if num_tokens >= self.MANY_TOKENS:
            self._steps = 0
            self.within(num_tokens)
        elif self._steps >= self.EVERY:
            self._steps = 0
            trim()

    def within(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` has come to a point where most of its results so far are not needed any more."""
        if num_tokens >= self.MANY_TOKENS:
            trim()
            release_code()


@contextmanager
def loading() -> Iterator[None]:
    """While weights are brought into their final form in the CPU's memory: large blocks are mappings of their own.

    Packing allocates pieces between weights that stay; from one heap the pieces would leave gaps, which never leave
    memory. What was freed before and within is given back at both ends, and so is code that has run. With glibc this
    fixes the thresholds of the whole process, which it otherwise adapts; nothing is changed where the environment sets
    them.
    """
    release_libraries()
    is_set = any(name in os.environ for name in _SETTINGS)
    mallopt = None if is_set else getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        trim()
        mallopt(_M_MMAP_THRESHOLD, _LOADING_BYTES)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _SERVING_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _SERVING_TRIM_BYTES)
            trim()
        release_libraries()


def _libc() -> ctypes.CDLL | None:
    """The C library, where it may be glibc."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None
