"""The worker half of the tier: it owns the bytes, and does with places what the engine half says."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trivet.roles.connector import TransferReport, TransferWorker
from trivet_offload.background import Background
from trivet_offload.fingerprint import describe, digest, facts, folder, rank_folder
from trivet_offload.geometry import Geometry
from trivet_offload.movers import make_mover
from trivet_offload.payload import NONE, Moves, decode
from trivet_offload.segments import SegmentStore

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.plan import Transfer, UInt8
    from trivet.roles import Attention
    from trivet_offload.options import OffloadOptions

_logger = logging.getLogger(__name__)

#: content that may wait to be written: so many bytes, or this share of the host memory if that is more
_LEAST_WAITING, _WAITING_SHARE = 64 * 2**20, 16
_DRAIN_SECONDS = _PERSIST_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Tag:
    """What a row really holds."""

    generation: int
    key: bytes
    size: int  #: bytes


@dataclass(frozen=True, slots=True)
class _Read:
    """A block to be read from disk."""

    group: int
    block: int
    key: bytes
    place: int
    promote: int  #: row that gets the content too, or ``NONE``


@dataclass(slots=True)
class _Open:
    """A transfer under way: the copies that have not ended, and the blocks that cannot be had."""

    transfer_id: int
    tickets: list[Any] = field(default_factory=list)
    reading: bool = False
    bad: list[tuple[int, int]] = field(default_factory=list)  # (group, block)


class OffloadWorker(TransferWorker):
    """Copies blocks to and from rows of host memory, and rows to and from disk in the background."""

    endpoint = "offload"
    wants_layers: ClassVar[bool] = False

    def __init__(self, context: WorkerContext, options: OffloadOptions) -> None:
        self._context, self._options = context, options
        #: by row; in the order in which the rows were filled
        self._tags: dict[int, Tag] = {}
        self._open: deque[_Open] = deque()
        self._disk: SegmentStore | None = None
        self._background: Background | None = None
        self._lost = False
        #: rows that content waited in to be written: memory that was touched before is faster
        self._spare: list[UInt8] = []

    def bind(self, attention: Attention | None) -> None:
        assert attention is not None, "a cache tier needs a storage"
        layout = self._context.layout
        geometry = Geometry.of(layout)
        slots = geometry.host_slots(self._options)
        self._num_groups = len(layout.groups)
        self._mover = make_mover(attention, layout, slots, geometry.slot_bytes)
        self._scratch = self._mover.scratch()
        if self._options.path is not None:
            self._bind_disk(geometry, self._options.path)

    def _bind_disk(self, geometry: Geometry, path: str) -> None:
        context = self._context
        found = facts(context, context.layout, context.device, self._options)
        fingerprint = digest(found)
        where = folder(path, fingerprint)
        plan = geometry.segments(self._options)
        self._disk = SegmentStore(rank_folder(where, context.rank), plan, fingerprint, path)
        if context.rank == 0:
            describe(where, found)
        self._background = Background(max(_LEAST_WAITING, self._options.host_memory // _WAITING_SHARE))

    # ------------------------------------------------------------------ transfers

    def submit(self, transfer: Transfer, *, store: bool) -> None:
        moves = decode(transfer.payload)
        places = [(g, block) for g, blocks in enumerate(transfer.blocks) for block in blocks.tolist() if block]
        keys = [key for key in transfer.keys if key]
        if not len(places) == len(keys) == len(moves.host):
            raise ValueError(f"transfer {transfer.transfer_id} has {len(places)} blocks for {len(moves.host)} places")
        (self._store if store else self._load)(_Open(transfer.transfer_id), moves, places, keys)

    def _store(self, entry: _Open, moves: Moves, places: Sequence[tuple[int, int]], keys: Sequence[bytes]) -> None:
        self._demote(moves)
        for slot in moves.host:
            self._tags.pop(slot, None)
        copies = [(group, block, slot) for (group, block), slot in zip(places, moves.host, strict=True)]
        entry.tickets.append(self._mover.store(copies))
        for (group, _), slot, key in zip(places, moves.host, keys, strict=True):
            self._tags[slot] = Tag(moves.generation, key, self._mover.group_bytes[group])
        self._open.append(entry)

    def _load(self, entry: _Open, moves: Moves, places: Sequence[tuple[int, int]], keys: Sequence[bytes]) -> None:
        self._demote(moves)
        for slot in moves.promote:
            self._tags.pop(slot, None)
        copies: list[tuple[int, int, int]] = []
        reads: list[_Read] = []
        for i, ((group, block), slot, key) in enumerate(zip(places, moves.host, keys, strict=True)):
            if slot == NONE:
                reads.append(_Read(group, block, key, moves.disk[i], moves.promote[i]))
                continue
            tag = self._tags.get(slot)
            if tag is not None and (tag.generation, tag.key) == (moves.generation, key):
                copies.append((group, block, slot))
            else:
                entry.bad.append((group, block))
        if copies:
            entry.tickets.append(self._mover.load(copies))
        if reads and self._background is None:
            entry.bad += [(one.group, one.block) for one in reads]
        elif reads and self._background is not None:
            entry.reading = True
            self._background.add(partial(self._read, entry, moves.generation, reads, self._mover.mark()))
        self._open.append(entry)

    # ------------------------------------------------------------------ disk

    def _demote(self, moves: Moves) -> None:
        """Write the old content of rows to disk, as far as the disk keeps up. What is left out is a miss later."""
        disk, background = self._disk, self._background
        for slot, place in moves.demote:
            tag = self._tags.get(slot)
            if tag is None or disk is None or background is None:
                continue
            if not background.room(tag.size):
                if not self._lost:
                    self._lost = True
                    _logger.warning("the disk is slower than blocks are evicted; some are dropped and computed again")
                continue
            row = self._spare.pop() if self._spare else np.empty(self._mover.host.shape[1], np.uint8)
            row[: tag.size] = self._mover.host[slot, : tag.size]
            background.add(partial(self._write, disk, place, tag, row), tag.size)

    def _write(self, disk: SegmentStore, place: int, tag: Tag, row: UInt8) -> None:
        """In the background."""
        try:
            disk.write(place, tag.generation, tag.key, row[: tag.size])
        finally:
            self._spare.append(row)

    def _read(self, entry: _Open, generation: int, reads: Sequence[_Read], after: Any) -> None:
        """In the background: fill blocks, and rows that are to have their content too."""
        assert self._disk is not None
        done = 0
        try:
            for one in reads:
                size = self._mover.group_bytes[one.group]
                row = self._scratch if one.promote == NONE else self._mover.host[one.promote]
                if self._disk.read(one.place, generation, one.key, row[:size]):
                    self._mover.write(after, one.group, one.block, row)
                    if one.promote != NONE:
                        self._tags[one.promote] = Tag(generation, one.key, size)
                else:
                    entry.bad.append((one.group, one.block))
                done += 1
        finally:
            entry.bad += [(one.group, one.block) for one in reads[done:]]
            entry.reading = False

    def _persist(self) -> None:
        """Write what only host memory has to unused places, the newest first, as far as time and room go."""
        disk = self._disk
        assert disk is not None
        if not self._tags:
            return
        deadline = time.monotonic() + _PERSIST_SECONDS
        generation = max(tag.generation for tag in self._tags.values())
        there, unused = disk.content(generation), iter(disk.unused(generation))
        for slot, tag in reversed(self._tags.items()):
            if tag.generation != generation or tag.key in there:
                continue
            place = next(unused, None)
            if place is None or time.monotonic() > deadline:
                return
            if not disk.write(place, tag.generation, tag.key, self._mover.host[slot, : tag.size]):
                return

    # ------------------------------------------------------------------ reports

    def poll(self) -> TransferReport:
        report = TransferReport(invalid_blocks=[[] for _ in range(self._num_groups)])
        for _ in range(len(self._open)):
            entry = self._open.popleft()
            if entry.reading or not all(self._mover.done(ticket) for ticket in entry.tickets):
                self._open.append(entry)
                continue
            (report.failed if entry.bad else report.finished).append(entry.transfer_id)
            for group, block in entry.bad:
                report.invalid_blocks[group].append(block)
        return report

    def shutdown(self) -> None:
        if self._background is not None and self._disk is not None:
            ended = self._background.close(_DRAIN_SECONDS)
            if not ended:
                _logger.warning("the disk is slow; blocks that wait to be written are dropped")
            elif self._options.persist:
                self._mover.finish()
                self._persist()
            if ended:
                self._disk.close()
            self._background = self._disk = None
