"""The copies of CUDA devices, with streams that only write down what they are asked to wait for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import offload_kit as kit
import pytest
import torch

from trivet_offload import movers

LOG: list[str] = []


class Event:
    def __init__(self, name: str) -> None:
        self.name, self.ended = name, False

    def query(self) -> bool:
        return self.ended


class Stream:
    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.name = {1: "side", 2: "aside"}.get(Stream.made, "current")
        self.events = 0

    def wait_stream(self, other: Stream) -> None:
        LOG.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        LOG.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.events += 1
        return Event(f"{self.name} {self.events}")

    def synchronize(self) -> None:
        LOG.append(f"{self.name} ends")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The current stream; pinned memory is plain memory here."""

    @contextmanager
    def use(_stream: Any) -> Any:
        yield

    LOG.clear()
    Stream.made = 2
    current = Stream()
    Stream.made = 0
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "device", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    monkeypatch.setattr(movers, "_pinned", lambda rows, size: torch.zeros(rows, size, dtype=torch.uint8))
    return current


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_blocks_of_all_groups_come_back(
    streams: Stream, strided: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = kit.make_layout(((0, 2), (1,)), dtype="bfloat16", dim=5)
    storage = kit.Storage(layout, strided=strided)
    size = kit.Geometry.of(layout).slot_bytes
    monkeypatch.setattr(movers, "_STAGING_BYTES", most * size)
    parts = [[movers._bytes(cache) for layer in group.layers for cache in storage.kv(layer)] for group in layout.groups]
    mover = movers.CudaMover(parts, 10, size)
    assert mover.group_bytes == kit.Geometry.of(layout).group_bytes
    moves = [(0, 3, 0), (1, 4, 1), (0, 5, 2), (1, 6, 9), (0, 7, 4)]
    contents = [storage.content(layout.groups[group].layers, block) for group, block, _ in moves]
    ticket = mover.store(moves)
    assert not mover.done(ticket)
    ticket.ended = True
    assert mover.done(ticket)
    storage.poison(range(40))
    mover.load([(group, block + 20, slot) for group, block, slot in moves])
    got = [storage.content(layout.groups[group].layers, block + 20) for group, block, _ in moves]
    assert got == contents
    storage.poison(range(40))
    row = mover.scratch()
    row[:] = mover.host[2]
    mover.write(mover.mark(), 0, 11, row)
    assert storage.content((0, 2), 11) == contents[2]


def test_buffers_are_filled_again_when_they_have_been_copied(streams: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = kit.make_layout()
    storage = kit.Storage(layout)
    size = kit.Geometry.of(layout).slot_bytes
    monkeypatch.setattr(movers, "_STAGING_BYTES", 2 * size)
    mover = movers.CudaMover([[movers._bytes(cache) for cache in storage.kv(0)]], 10, size)
    mover.store([(0, 1 + i, i) for i in range(5)])
    assert LOG == [
        "side waits for current",
        "side waits for current",
        "current waits for side 1",
        "side waits for current",
    ]
    LOG.clear()
    mover.store([(0, 9, 9)])
    assert LOG == ["current waits for side 2", "side waits for current"]
    LOG.clear()
    mover.load([(0, 9, 1)])
    assert LOG == ["side waits for current"], "blocks may be in use by what was started before"
    LOG.clear()
    mover.write(mover.mark(), 0, 11, np.zeros(size, np.uint8))
    assert LOG == ["aside waits for current 1", "aside ends"]
