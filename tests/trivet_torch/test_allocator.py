"""Memory that is not needed any more goes back to the system."""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trivet_torch import allocator
from trivet_torch.allocator import (
    Kept,
    Pages,
    Trimmer,
    libraries_code,
    release_code,
    release_libraries,
    unchanged_libraries,
)

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")

SETTINGS = """
import ctypes, json, sys
from trivet_torch.allocator import loading

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) / 1024

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def taken(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address

def packing():
    # As packing does: a large piece, a result that stays, and the piece is freed.
    for _ in range(30):
        piece = taken(4 << 20)
        kept.append(taken(2 << 20))
        libc.free(piece)
        piece = taken(6 << 20)
        kept.append(taken(2 << 20))
        libc.free(piece)

kept = []
libc.free(taken(30 << 20))  # from here on glibc takes blocks of this size from the heap
before = resident()
with loading():
    packing()
print(json.dumps(resident() - before - len(kept) * 2))
"""


@pytest.mark.skipif(not GLIBC, reason="another C library than glibc")
def test_pieces_of_packing_leave_no_gaps() -> None:
    done = subprocess.run([sys.executable, "-c", SETTINGS], capture_output=True, text=True, check=True, timeout=100)
    assert json.loads(done.stdout) < 4  # MiB


def test_code_that_has_run_leaves_memory_and_runs_again() -> None:
    if not Path("/proc/self/maps").is_file():
        pytest.skip("the system does not tell what is mapped")
    code = (
        "import sys, torch\n"
        "from trivet_torch.allocator import release_code, release_libraries\n"
        "def resident():\n"
        "    with open('/proc/self/status') as status:\n"
        "        return next(int(line.split()[1]) for line in status if line.startswith('RssFile:'))\n"
        "before = resident()\n"
        "release_code()\n"
        "code = resident()\n"
        "release_libraries()\n"
        "after = resident()\n"
        "assert torch.ones(3, 3).mm(torch.ones(3, 3)).sum() == 27\n"
        "print(before, code, after)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    before, code, after = map(int, done.stdout.split())
    assert after < code < before / 2


def test_without_lists_of_mappings_nothing_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAPS", "_DETAILED_MAPS"):
        monkeypatch.setattr(allocator, name, tmp_path / "maps")
    monkeypatch.setattr(allocator, "_release", lambda spans: pytest.fail(f"{spans} released"))
    release_code()
    release_libraries()


#: address, access, inode, path, and KiB resident, changed, swapped out
MAPPINGS = [
    ("1000-3000", "r-xp", 7, "/usr/lib/libtorch.so", 8, 0, 0),
    ("3000-4000", "r--p", 7, "/usr/lib/libtorch.so", 4, 0, 0),
    ("4000-5000", "r--p", 7, "/usr/lib/libtorch.so", 4, 4, 0),  # what the linker has filled in
    ("5000-6000", "r--p", 7, "/usr/lib/libtorch.so", 4, 0, 4),  # the same, in part swapped out
    ("6000-7000", "rw-p", 7, "/usr/lib/libtorch.so", 4, 0, 0),
    ("7000-8000", "r-xp", 8, "/usr/lib/libc.so.6", 0, 0, 0),
    ("8000-9000", "r--p", 9, "/models/model.safetensors", 4, 0, 0),
    ("9000-a000", "r-xp", 0, "", 4, 0, 0),
    ("a000-b000", "r-xp", 0, "[vdso]", 4, 0, 0),
]


def test_only_unchanged_mappings_of_libraries_are_released() -> None:
    lines = [f"{span} {access} 00000000 08:01 {inode} {path}" for span, access, inode, path, *_ in MAPPINGS]
    assert libraries_code("\n".join(lines)) == [(0x1000, 0x3000), (0x7000, 0x8000)]
    details = [
        f"{line}\nSize: 4 kB\nRss: {rss} kB\nAnonymous: {changed} kB\nSwap: {swapped} kB\nVmFlags: rd mr mw me"
        for line, (*_, rss, changed, swapped) in zip(lines, MAPPINGS, strict=True)
    ]
    assert unchanged_libraries("\n".join(details)) == [(0x1000, 0x3000), (0x3000, 0x4000)]


def test_memory_is_trimmed_before_and_within_long_steps_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(allocator, "trim", lambda: trims.append(None))
    monkeypatch.setattr(allocator, "release_code", lambda: None)
    trimmer = Trimmer()

    def trims_after(*steps: int) -> int:
        for num_tokens in steps:
            trimmer.begins(num_tokens)
        return len(trims)

    assert trims_after(*[1] * (Trimmer.EVERY - 1)) == 0
    assert trims_after(Trimmer.MANY_TOKENS) == 1
    assert trims_after(*[Trimmer.MANY_TOKENS - 1] * (Trimmer.EVERY - 1)) == 1
    assert trims_after(1) == 2
    assert trims_after(1) == 2
    trimmer.within(Trimmer.MANY_TOKENS - 1)
    assert len(trims) == 2
    trimmer.within(Trimmer.MANY_TOKENS)
    assert len(trims) == 3


def test_kept_memory_is_used_again_once_its_result_is_gone() -> None:
    kept = Kept(torch.bfloat16)
    first = kept.get(3, 5)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    address = first.data_ptr()
    del first
    again = kept.get(5, 3)
    assert again.data_ptr() == address
    part = again[4:].fill_(2.0)
    del again
    other = kept.get(5, 3).fill_(7.0)  # a view is left of the one before
    assert part.tolist() == [[2.0] * 3]
    kept.release()  # nothing is lost with it
    assert kept.get(5, 3).fill_(1.0).data_ptr() not in (other.data_ptr(), address)
    assert (part.sum().item(), other.sum().item()) == (6.0, 105.0)
    for one in (kept, Kept(torch.float32)):
        assert one.get(0, 5).shape == (0, 5)


@pytest.mark.skipif(not GLIBC, reason="memory is given back on Linux")
def test_released_pages_leave_the_process() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    pages = Pages(32 << 20)
    before = resident()
    pages.bytes.fill_(1)
    assert resident() - before > 30 << 20
    pages.release()
    assert resident() - before < 2 << 20
    assert int(pages.bytes.max()) == 0
    assert Pages(0).bytes.shape == (0,)
