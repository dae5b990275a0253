"""Copies between the KV storage and rows of host memory, on the CPU and on CUDA devices.

A *row* is the content of one block: for every layer of its group the block's keys, then its values, as bytes. ``moves``
are ``(group, block, slot)``: block ids of a group, and rows ``host[slot]``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trivet.errors import TrivetError
from trivet.plan import UInt8
from trivet_schemas.options import format_size
from trivet_torch.memory import free_ram

if TYPE_CHECKING:
    from trivet.roles import Attention, KVLayout

Move = tuple[int, int, int]

#: a buffer on the device, of which there are two
_STAGING_BYTES = 32 * 2**20


class Mover(ABC):
    """``host`` ``[slots, slot_bytes]`` uint8 are the rows, ``group_bytes[g]`` what a block of group ``g`` has."""

    host: UInt8
    group_bytes: tuple[int, ...]

    @abstractmethod
    def store(self, moves: Sequence[Move]) -> Any:
        """Blocks to rows. When it returns the blocks may be overwritten by whatever is put on the current stream.
        Returns a ticket for :meth:`done`; before that, the rows are not complete."""

    @abstractmethod
    def load(self, moves: Sequence[Move]) -> Any:
        """Rows to blocks, after everything that is on the current stream; returns a ticket."""

    @abstractmethod
    def done(self, ticket: Any) -> bool:
        """Whether the copies have ended."""

    @abstractmethod
    def mark(self) -> Any:
        """What :meth:`write` has to come after: everything that was put on the current stream until now."""

    @abstractmethod
    def write(self, after: Any, group: int, block: int, row: UInt8) -> None:
        """One row to a block, complete when it returns; for a thread of its own."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all copies that were started."""

    @abstractmethod
    def scratch(self) -> UInt8:
        """``[slot_bytes]``: a further row, for :meth:`write`."""


def make_mover(attention: Attention, layout: KVLayout, slots: int, slot_bytes: int) -> Mover:
    """The mover for the device that the storage is on.

    Raises:
        TrivetError: If the memory for the rows is not there, or the storage has other sizes than the layout says.
    """
    groups = [
        [_bytes(torch.as_tensor(cache)) for layer in group.layers for cache in attention.kv(layer)]
        for group in layout.groups
    ]
    sizes = tuple(sum(part[0].numel() for part in parts) for parts in groups)
    if max(sizes) > slot_bytes:
        raise TrivetError(
            f"the attention plugin keeps blocks of {max(sizes)} bytes where the KV layout says {slot_bytes}; the cache "
            "tier 'offload' cannot serve it, remove it from plugins.cache_tier or select another attention plugin"
        )
    movers: dict[str, type[CpuMover | CudaMover]] = {"cpu": CpuMover, "cuda": CudaMover}
    device = groups[0][0].device.type
    if device not in movers:
        raise TrivetError(
            f"the cache tier 'offload' serves KV caches on cpu and cuda, not on {device}; remove it from "
            "plugins.cache_tier"
        )
    size, free = slots * slot_bytes, free_ram()
    # The system promises more than it has, and kills who takes its word for it.
    if size > free:
        raise TrivetError(_too_much(size, f"{format_size(free)} are free"))
    try:
        return movers[device](groups, slots, slot_bytes)
    except (RuntimeError, MemoryError) as exc:
        raise TrivetError(_too_much(size, exc)) from exc


def _too_much(size: int, why: object) -> str:
    return f"plugins.cache_tier.offload.host_memory: {format_size(size)} cannot be allocated ({why}); set it lower"


def _bytes(cache: Tensor) -> Tensor:
    """``[num_blocks, ...]`` uint8 over the same memory, whatever its strides; ``[num_blocks, page_bytes]`` where the
    bytes of a block lie together."""
    inner = sorted((d for d in range(1, cache.dim()) if cache.shape[d] > 1), key=cache.stride, reverse=True)
    shape = (len(cache), *(cache.shape[d] for d in inner), 1)
    strides = (cache.stride(0), *(cache.stride(d) for d in inner), 1)
    pages = cache.as_strided(shape, strides).view(torch.uint8)
    return pages.flatten(1) if pages[0].is_contiguous() else pages


class CpuMover(Mover):
    """Plain copies, complete when the call returns."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], slots: int, slot_bytes: int) -> None:
        self.group_bytes = tuple(sum(part[0].numel() for part in parts) for parts in groups)
        # numpy's zeros are pages that the system hands out when they are first written to.
        self.host = np.zeros((slots, slot_bytes), np.uint8)
        self._groups = [_places(parts) for parts in groups]

    def store(self, moves: Sequence[Move]) -> None:
        host = self.host
        for group, block, slot in moves:
            row = host[slot]
            for pages, start, end, shape in self._groups[group]:
                row[start:end].reshape(shape)[...] = pages[block]

    def load(self, moves: Sequence[Move]) -> None:
        for group, block, slot in moves:
            self.write(None, group, block, self.host[slot])

    def done(self, ticket: None) -> bool:
        return True

    def mark(self) -> None:
        return None

    def write(self, after: None, group: int, block: int, row: UInt8) -> None:
        for pages, start, end, shape in self._groups[group]:
            pages[block] = row[start:end].reshape(shape)

    def finish(self) -> None:
        pass

    def scratch(self) -> UInt8:
        return np.empty(self.host.shape[1], np.uint8)


def _places(parts: Sequence[Tensor]) -> list[tuple[UInt8, int, int, tuple[int, ...]]]:
    """Per part of a row: the storage, first and last byte within the row, and the shape of a block."""
    places = []
    start = 0
    for part in parts:
        end = start + part[0].numel()
        places.append((part.numpy(), start, end, tuple(part.shape[1:])))
        start = end
    return places


class CudaMover(Mover):
    """Blocks are gathered on the current stream, and copied from and to pinned memory on a stream at the side while the
    step runs.

    What is gathered waits in one of two buffers on the device. If more is stored at once than they hold, the current
    stream waits for the copies: it must not overwrite blocks that have not been read."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], slots: int, slot_bytes: int) -> None:
        self.group_bytes = tuple(sum(part[0].numel() for part in parts) for parts in groups)
        self._groups = groups
        self._device = groups[0][0].device
        self._rows = _pinned(slots, slot_bytes)
        self.host = self._rows.numpy()
        self._most = max(min(_STAGING_BYTES // slot_bytes, slots), 1)
        self._buffers = torch.empty(2, self._most, slot_bytes, dtype=torch.uint8, device=self._device)
        self._copied: list[Any] = [None, None]  # by buffer: the event that ends its last copies
        self._next = 0
        self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # For the thread that reads from disk.
        self._aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def store(self, moves: Sequence[Move]) -> Any:
        current, side = torch.cuda.current_stream(self._device), self._side
        event = None
        for group, blocks, slots in _pieces(moves, self._most):
            if (busy := self._copied[self._next]) is not None:
                current.wait_event(busy)
            rows = self._buffers[self._next, : len(slots), : self.group_bytes[group]]
            self._gather(group, blocks, rows)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for row, slot in zip(rows, slots, strict=True):
                    self._rows[slot, : len(row)].copy_(row, non_blocking=True)
                event = side.record_event()
            self._copied[self._next] = event
            self._next = 1 - self._next
        return event

    def load(self, moves: Sequence[Move]) -> Any:
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for group, blocks, slots in _pieces(moves, self._most):
                rows = torch.empty(len(slots), self.group_bytes[group], dtype=torch.uint8, device=self._device)
                for row, slot in zip(rows, slots, strict=True):
                    row.copy_(self._rows[slot, : len(row)], non_blocking=True)
                self._scatter(group, blocks, rows)
            return side.record_event()

    def done(self, ticket: Any) -> bool:
        return bool(ticket.query())

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def write(self, after: Any, group: int, block: int, row: UInt8) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._aside):
            self._aside.wait_event(after)
            content = torch.from_numpy(row[: self.group_bytes[group]]).to(self._device, non_blocking=True)
            self._scatter(group, [block], content[None])
            self._aside.synchronize()

    def finish(self) -> None:
        self._side.synchronize()

    def scratch(self) -> UInt8:
        row: UInt8 = _pinned(1, self._rows.shape[1])[0].numpy()
        return row

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self._device)

    def _gather(self, group: int, blocks: Sequence[int], rows: Tensor) -> None:
        index, start = self._index(blocks), 0
        for part in self._groups[group]:
            end = start + part[0].numel()
            rows[:, start:end] = part.index_select(0, index).flatten(1)
            start = end

    def _scatter(self, group: int, blocks: Sequence[int], rows: Tensor) -> None:
        index, start = self._index(blocks), 0
        for part in self._groups[group]:
            end = start + part[0].numel()
            part.index_copy_(0, index, rows[:, start:end].reshape(len(rows), *part.shape[1:]))
            start = end


def _pinned(rows: int, row_bytes: int) -> Tensor:
    return torch.empty(rows, row_bytes, dtype=torch.uint8, pin_memory=True)


def _pieces(moves: Sequence[Move], most: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Blocks and slots of one group at a time, at most so many at once."""
    groups: dict[int, list[Move]] = {}
    for move in moves:
        groups.setdefault(move[0], []).append(move)
    for group, mine in groups.items():
        for start in range(0, len(mine), most):
            piece = mine[start : start + most]
            yield group, [block for _, block, _ in piece], [slot for _, _, slot in piece]
