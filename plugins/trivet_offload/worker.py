"""The worker half of the tier: it owns the bytes, and does with places what the engine half says."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.roles.connector import TransferReport, TransferWorker
from trivet_offload.geometry import Geometry
from trivet_offload.movers import make_mover
from trivet_offload.payload import NONE, Moves, decode

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.plan import Transfer
    from trivet.roles import Attention
    from trivet_offload.options import OffloadOptions

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tag:
    """What a row really holds."""

    generation: int
    key: bytes
    size: int  #: bytes


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

    def bind(self, attention: Attention | None) -> None:
        assert attention is not None, "a cache tier needs a storage"
        layout = self._context.layout
        geometry = Geometry.of(layout)
        slots = geometry.host_slots(self._options)
        self._num_groups = len(layout.groups)
        self._mover = make_mover(attention, layout, slots, geometry.slot_bytes)

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
        copies: list[tuple[int, int, int]] = []
        for (group, block), slot, key in zip(places, moves.host, keys, strict=True):
            if slot == NONE:
                continue
            tag = self._tags.get(slot)
            if tag is not None and (tag.generation, tag.key) == (moves.generation, key):
                copies.append((group, block, slot))
            else:
                entry.bad.append((group, block))
        if copies:
            entry.tickets.append(self._mover.load(copies))
        self._open.append(entry)

    def _demote(self, moves: Moves) -> None:
        pass

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
        self._open.clear()
