"""Instruction sets that the native kernels are compiled for, and which of them this processor has."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# arch_prctl(2) of Linux on x86-64, ARCH_REQ_XCOMP_PERM, and the number of the tiles' state.
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions: its name, the compiler's flags and what the system calls what it needs."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


# Linux calls LZCNT abm, by AMD's first name for it. A processor without it takes it for BSR and computes wrong.
_V3 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm", "popcnt"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")

#: from the richest to the poorest; the last one runs on every processor
LEVELS = (
    Level("amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), _AMX),
    Level("avx512_bf16", _BF16_FLAGS, _BF16),
    Level("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
    Level("avx512", ("-march=x86-64-v4",), _V4),
    Level("avx2", ("-march=x86-64-v3",), _V3),
    Level("generic", (), frozenset()),
)


@functools.cache
def usable_levels() -> tuple[Level, ...]:
    """The levels whose instructions this processor and its system support, the richest first."""
    present = cpu_flags() if platform.machine().lower() in {"x86_64", "amd64"} else frozenset()
    usable = tuple(level for level in LEVELS if level.needs <= present)
    if any("amx_tile" in level.needs for level in usable) and not _ask_for_tiles():
        return tuple(level for level in usable if "amx_tile" not in level.needs)
    return usable


def _ask_for_tiles() -> bool:
    """Ask the system to let this process use matrix tiles, whose state makes every thread larger; whether it does.
    Without that they are illegal instructions."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """What the kernel lists under ``flags`` for the first processor; empty where it does not say."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                return frozenset(value.split())
    return frozenset()
