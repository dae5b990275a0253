"""Giving memory back to the system that this process does not need any more."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# See madvise(2) of Linux.
_MADV_DONTNEED = 4
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


def release_code(maps: Path = Path("/proc/self/maps")) -> None:
    """Let the code of shared libraries leave this process' memory (Linux); what runs again comes back from the system's
    cache of files, in a fraction of a millisecond per MiB.

    Most of the 70 MiB of torch's code that importing it has touched registers operators, and never runs again. Only
    executable pages that cannot be written are let go of: nobody has changed those.

    Args:
        maps: What the system says is mapped.
    """
    madvise = getattr(_libc(), "madvise", None)
    if madvise is None or not maps.is_file():
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps.read_text().splitlines():
        span, access, _, _, inode, *path = line.split(maxsplit=5)
        if access == "r-xp" and inode != "0" and path and ".so" in path[0].rpartition("/")[2]:
            start, end = (int(address, 16) for address in span.split("-"))
            madvise(start, end - start, _MADV_DONTNEED)


class Trimmer:
    """Gives back, now and then, what steps have freed.

    Results of a step take megabytes and come from the heap, between the small objects of the engine that stay. So what
    one step leaves free is not always what the next one needs, and the heap grows although no more of it is in use than
    before. Giving it back costs the next step some milliseconds for new pages: it is done after steps of many tokens,
    which take far longer, and once in many small ones.
    """

    #: tokens that make a step a long one
    MANY_TOKENS = 256
    #: small steps between two times
    EVERY = 64

    def __init__(self) -> None:
        self._steps = 0

    def stepped(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` has ended."""
        self._steps += 1
        if num_tokens >= self.MANY_TOKENS or self._steps >= self.EVERY:
            self._steps = 0
            trim()


@contextmanager
def loading() -> Iterator[None]:
    """While weights are brought into their final form in the CPU's memory: large blocks are mappings of their own.

    Packing allocates pieces between weights that stay; from one heap the pieces would leave gaps, which never leave
    memory. What was freed before and within is given back at both ends, before also code that has run. With glibc this
    fixes the thresholds of the whole process, which it otherwise adapts; nothing is changed where the environment sets
    them.
    """
    release_code()
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        yield
        return
    trim()
    mallopt(_M_MMAP_THRESHOLD, _LOADING_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _SERVING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _SERVING_TRIM_BYTES)
        trim()


def _libc() -> ctypes.CDLL | None:
    """The C library, where it may be glibc."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None
