"""Blocks in files of a bounded size, which survive a restart.

A segment file is a header, a table with one entry per place, and the places::

    0              header: magic, format, geometry, fingerprint, checksum
    4096           table: one entry per place: key, size, checksum, generation, stamp, whether it is valid
    data_offset    places of slot_bytes each

Files are sparse, and made when a place in them is first written. Reading goes through a memory map; writing goes
through the file, whose pages the map shares, because a full disk is then an error code and not a signal. An entry is
invalidated before its place is written, and written after it: at any moment, a killed process leaves valid entries
only. What a loss of power leaves is found out by the checksum, which covers key, generation and content."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.errors import TrivetError
from trivet.plan import UInt8
from trivet_schemas.options import format_size

_logger = logging.getLogger(__name__)

#: version of everything here, and of what keys and rows mean
FORMAT = 1
#: longest key that has room in an entry
MAX_KEY = 64
SEGMENT_BYTES = 64 * 2**20

_MAGIC = b"TRVKVSEG"
_HEADER = struct.Struct("<8sIQQQ32s")
_PAGE = 4096
_ENTRY = np.dtype(
    [
        ("stamp", "<u8"),
        ("generation", "<u4"),
        ("crc", "<u4"),
        ("size", "<u4"),
        ("length", "<u2"),
        ("valid", "u1"),
        ("unused", "u1"),
        ("key", "u1", (MAX_KEY,)),
    ]
)
_MOST_OPEN = 64  # segments, each a file and a map

Table = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """How places lie in files: the same for the engine and all workers."""

    slot_bytes: int
    per_segment: int
    num_slots: int

    @classmethod
    def of(cls, slot_bytes: int, most_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> SegmentPlan:
        """As many places as ``most_bytes`` of files have. Raises TrivetError if there is not even one."""
        per_segment = max((min(segment_bytes, most_bytes) - 3 * _PAGE) // (slot_bytes + _ENTRY.itemsize), 1)
        full = cls(slot_bytes, per_segment, per_segment)
        whole, rest = divmod(most_bytes, full.file_bytes)
        slots = whole * per_segment + max((rest - full.data_offset) // slot_bytes, 0)
        if slots < 1:
            raise TrivetError(
                f"plugins.cache_tier.offload.disk_memory: {format_size(most_bytes)} is less than one block of this "
                f"model takes on disk, {format_size(full.file_bytes)}; set it to a multiple of that, or remove `path`"
            )
        return cls(slot_bytes, per_segment, slots)

    @property
    def data_offset(self) -> int:
        """Where the places of a file begin."""
        return _PAGE + -(-self.per_segment * _ENTRY.itemsize // _PAGE) * _PAGE

    @property
    def file_bytes(self) -> int:
        """The length of a file. The last one may hold fewer places than it has."""
        return self.data_offset + self.per_segment * self.slot_bytes

    @property
    def table_bytes(self) -> int:
        """What the entries of all places take in memory."""
        return self.num_slots * _ENTRY.itemsize

    @property
    def num_segments(self) -> int:
        """Files, when all are there."""
        return -(-self.num_slots // self.per_segment)

    def header(self, index: int, fingerprint: bytes) -> bytes:
        """What a file begins with, checksum included."""
        fields = _HEADER.pack(_MAGIC, FORMAT, self.slot_bytes, self.per_segment, index, fingerprint)
        return fields + struct.pack("<I", zlib.crc32(fields))


def segment_path(folder: Path, index: int) -> Path:
    """The file of a segment."""
    return folder / f"segment-{index:05}.kv"


def read_tables(folder: Path, plan: SegmentPlan, fingerprint: bytes) -> tuple[Table, dict[int, str]]:
    """``[num_slots]`` entries of all files, invalid where there is no file; and what is wrong with files, by number."""
    table = np.zeros(plan.num_segments * plan.per_segment, _ENTRY)
    problems: dict[int, str] = {}
    for index in range(plan.num_segments):
        path = segment_path(folder, index)
        try:
            with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
                problem = _problem(file.read(_PAGE), os.fstat(file.fileno()).st_size, plan, index, fingerprint)
                if problem is None:
                    start, count = index * plan.per_segment, plan.per_segment
                    table[start : start + count] = np.frombuffer(file.read(count * _ENTRY.itemsize), _ENTRY)
                else:
                    problems[index] = problem
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as exc:
            problems[index] = str(exc)
    table = table[: plan.num_slots]
    sane = (table["valid"] == 1) & (table["length"] <= MAX_KEY) & (table["size"] <= plan.slot_bytes)
    table["valid"] = sane
    return table, problems


def _problem(head: bytes, size: int, plan: SegmentPlan, index: int, fingerprint: bytes) -> str | None:
    expected = plan.header(index, fingerprint)
    if head[: len(expected)] != expected:
        return "it is damaged, or of another model or layout"
    return None if size >= plan.file_bytes else f"it is cut off after {size} of {plan.file_bytes} bytes"


def read_index(folder: Path, plan: SegmentPlan, fingerprint: bytes, generation: int) -> dict[int, bytes]:
    """Keys by place, the one that was written first in front; of equal keys only the newest."""
    table, _ = read_tables(folder, plan, fingerprint)
    places = np.flatnonzero((table["valid"] == 1) & (table["generation"] == generation))
    newest: dict[bytes, int] = {}
    for place in places[np.argsort(table["stamp"][places], kind="stable")].tolist():
        key = _key(table[place])
        newest.pop(key, None)
        newest[key] = place
    return {place: key for key, place in newest.items()}


def _key(entry: Any) -> bytes:
    return entry["key"][: entry["length"]].tobytes()  # type: ignore[no-any-return]


class SegmentStore:
    """The files of one rank, for its only user: they are locked while it is open.

    Methods may be called from one thread at a time.

    Raises:
        TrivetError: The folder cannot be used, or another process has it.
    """

    def __init__(self, folder: Path, plan: SegmentPlan, fingerprint: bytes, option: str) -> None:
        self.plan = plan
        self._folder, self._fingerprint = folder, fingerprint
        self._maps: OrderedDict[int, tuple[int, mmap.mmap]] = OrderedDict()
        self._troubled = False
        self._lock = _lock(folder, option)
        try:
            self._table = self._open()
        except BaseException as exc:
            os.close(self._lock)
            if isinstance(exc, OSError):
                raise TrivetError(unusable(option, exc)) from exc
            raise
        self._stamp = int(self._table["stamp"].max(initial=0))

    def _open(self) -> Table:
        table, problems = read_tables(self._folder, self.plan, self._fingerprint)
        for index, problem in problems.items():
            path = segment_path(self._folder, index)
            _logger.warning("%s is not used and will be made anew: %s", path, problem)
            _remove(path)
        for path in self._folder.glob("segment-*.kv"):
            number = path.stem.partition("-")[2]
            if number.isdecimal() and int(number) >= self.plan.num_segments:
                _logger.info("%s is removed: it is beyond the size of this tier", path)
                _remove(path)
        return table

    # ------------------------------------------------------------------ content

    def holds(self, place: int, generation: int, key: bytes) -> bool:
        """Whether the place has this content, as far as its entry says."""
        entry = self._table[place]
        return bool(entry["valid"]) and int(entry["generation"]) == generation and _key(entry) == key

    def content(self, generation: int) -> dict[bytes, int]:
        """Places by key."""
        table = self._table
        places = np.flatnonzero((table["valid"] == 1) & (table["generation"] == generation)).tolist()
        return {_key(table[place]): place for place in places}

    def unused(self, generation: int) -> list[int]:
        """Places that have no content of this generation, in ascending order."""
        table = self._table
        free: list[int] = np.flatnonzero((table["valid"] == 0) | (table["generation"] != generation)).tolist()
        return free

    def write(self, place: int, generation: int, key: bytes, content: UInt8) -> bool:
        """Put ``content`` ``[size]`` into a place; False if that cannot be done, and the place has nothing then."""
        if len(key) > MAX_KEY:
            return False
        entry = self._table[place]
        entry["valid"] = 0
        try:
            file, _ = self._segment(place // self.plan.per_segment)
            at, offset = self._entry_offset(place), self._offset(place)
            _write(file, entry.tobytes(), at)
            _write(file, content.data, offset)
            self._stamp += 1
            entry["stamp"], entry["generation"], entry["size"] = self._stamp, generation, len(content)
            entry["length"], entry["crc"], entry["valid"] = len(key), _checksum(key, generation, content), 1
            entry["key"][: len(key)] = np.frombuffer(key, np.uint8)
            _write(file, entry.tobytes(), at)
        except (OSError, ValueError) as exc:
            entry["valid"] = 0
            self._trouble("written to", exc)
            return False
        return True

    def read(self, place: int, generation: int, key: bytes, content: UInt8) -> bool:
        """Fill ``content`` ``[size]``; False, with undefined content, if it is not there or is damaged."""
        if not self.holds(place, generation, key) or int(self._table[place]["size"]) != len(content):
            return False
        offset = self._offset(place)
        try:
            file, mapped = self._segment(place // self.plan.per_segment)
            # A map's pages beyond the end of a file that was cut off are no memory.
            if os.fstat(file).st_size >= offset + len(content):
                content[:] = np.frombuffer(mapped, np.uint8, len(content), offset)
                if _checksum(key, generation, content) == int(self._table[place]["crc"]):
                    return True
        except (OSError, ValueError) as exc:
            self._trouble("read from", exc)
            return False
        _logger.warning("a block in %s is damaged", segment_path(self._folder, place // self.plan.per_segment))
        self._invalidate(place)
        return False

    def _invalidate(self, place: int) -> None:
        entry = self._table[place]
        entry["valid"] = 0
        try:
            _write(self._segment(place // self.plan.per_segment)[0], entry.tobytes(), self._entry_offset(place))
        except (OSError, ValueError) as exc:
            self._trouble("written to", exc)

    def _offset(self, place: int) -> int:
        return self.plan.data_offset + place % self.plan.per_segment * self.plan.slot_bytes

    def _entry_offset(self, place: int) -> int:
        return _PAGE + place % self.plan.per_segment * _ENTRY.itemsize

    def _trouble(self, what: str, exc: Exception) -> None:
        if not self._troubled:
            self._troubled = True
            _logger.warning("%s cannot be %s (%s); blocks that are lost are computed again", self._folder, what, exc)

    # ------------------------------------------------------------------ files

    def _segment(self, index: int) -> tuple[int, mmap.mmap]:
        found = self._maps.get(index)
        if found is not None:
            self._maps.move_to_end(index)
            return found
        plan, path = self.plan, segment_path(self._folder, index)
        file = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(file).st_size < plan.file_bytes:
                # New, or lost in the meantime: what its entries say is not so.
                self._table["valid"][index * plan.per_segment : (index + 1) * plan.per_segment] = 0
                os.ftruncate(file, 0)
                os.ftruncate(file, plan.file_bytes)
                _write(file, plan.header(index, self._fingerprint), 0)
            mapped = mmap.mmap(file, plan.file_bytes, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(file)
            raise
        self._maps[index] = file, mapped
        while len(self._maps) > _MOST_OPEN:
            _close(*self._maps.popitem(last=False)[1])
        return file, mapped

    def close(self) -> None:
        """Close the files and let others have them."""
        while self._maps:
            _close(*self._maps.popitem()[1])
        os.close(self._lock)


def open_file(path: Path, flags: int) -> int:
    """An open regular file. Anything else in its place, such as a pipe, which would wait for somebody at its other end,
    or a link to who knows where, is an OSError."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def _remove(path: Path) -> None:
    """What cannot be removed cannot be used either: its places are misses."""
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        _logger.warning("%s cannot be removed: %s", path, exc)


def _close(file: int, mapped: mmap.mmap) -> None:
    mapped.close()
    os.close(file)


def _checksum(key: bytes, generation: int, content: UInt8) -> int:
    return zlib.crc32(content.data, zlib.crc32(key, generation))


def _write(file: int, content: bytes | memoryview, offset: int) -> None:
    """All of it; a disk that is full in the middle raises with the next try."""
    view = memoryview(content).cast("B")
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def unusable(option: str, why: object) -> str:
    """The message for a ``path`` that cannot be used."""
    return (
        f"plugins.cache_tier.offload.path: {option!r} cannot be used ({why}); name a folder that can be written to, or "
        "remove the option to keep blocks in memory only"
    )


def _lock(folder: Path, option: str) -> int:
    """An open file whose lock ends with it, or with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as exc:
        raise TrivetError(unusable(option, exc)) from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        owner = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(file)
        raise TrivetError(
            f"plugins.cache_tier.offload.path: {option!r} is in use by another engine with the same model (process "
            f"{owner}, {folder}); stop that engine, or give this one another path or namespace"
        ) from exc
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    return file
