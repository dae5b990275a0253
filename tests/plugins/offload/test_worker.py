"""The worker half on real storage: bytes that come back are the bytes that went."""

from __future__ import annotations

import logging
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import offload_kit as kit
import pytest
import torch

from trivet.errors import TrivetError
from trivet.plan import StepPlan
from trivet.worker.transfers import TransferEndpoints
from trivet_offload.payload import Moves, encode
from trivet_offload.worker import OffloadWorker

LAYOUTS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two groups": {"groups": ((0, 2), (1,))},
    "bfloat16": {"dtype": "bfloat16", "dim": 5},
    "fp8": {"dtype": "fp8_e4m3", "dim": 7, "groups": ((0, 1),)},
}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("disk", [0, 30])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_as_they_went(name: str, disk: int, strided: bool, tmp_path: Path) -> None:
    layout = kit.make_layout(**LAYOUTS[name])
    storage = kit.Storage(layout, strided=strided)
    beside = [page[:, 2:].clone() for page in storage.pages]
    chosen = kit.options(4 if disk else 30, layout, disk=disk, path=tmp_path if disk else None)
    rig = kit.Rig(layout, chosen, storage)
    blocks = [(group.index, 1 + i + 10 * group.index, b"%d" % i) for group in layout.groups for i in range(8)]
    blocks = [(group, block, b"%d/%s" % (group, key)) for group, block, key in blocks]
    content = {key: storage.content(layout.groups[group].layers, block) for group, block, key in blocks}
    for entry in blocks:
        assert rig.store(entry) == [True]
    storage.poison(range(40))
    rng = random.Random(1)
    for _ in range(6):
        wanted = rng.sample(blocks, 4)
        places = rng.sample(range(20, 40), 4)
        ok, bad = rig.load(*((group, place, key) for (group, _, key), place in zip(wanted, places, strict=True)))
        assert ok, bad
        for (group, _, key), place in zip(wanted, places, strict=True):
            assert storage.content(layout.groups[group].layers, place) == content[key]
    assert all(torch.equal(page[:, 2:], old) for page, old in zip(storage.pages, beside, strict=True))
    rig.end()


def test_only_the_blocks_of_the_load_are_written() -> None:
    layout = kit.make_layout()
    rig = kit.Rig(layout, kit.options(4, layout))
    rig.store((0, 1, b"a"))
    before = [rig.storage.content((0,), block) for block in range(40)]
    assert rig.load((0, 7, b"a"))[0]
    after = [rig.storage.content((0,), block) for block in range(40)]
    assert after[7] == before[1]
    assert [i for i in range(40) if before[i] != after[i]] == [7]


def test_a_store_has_read_its_blocks_when_it_was_submitted(tmp_path: Path) -> None:
    """Also the rows whose old content goes to disk."""
    layout = kit.make_layout()
    rig = kit.Rig(layout, kit.options(1, layout, disk=4, path=tmp_path))
    contents: dict[bytes, bytes] = {}
    for i, key in enumerate((b"a", b"b", b"c")):
        contents[key] = rig.storage.content((0,), 1 + i)
        choice = rig.tier.store([key])
        transfer = rig.transfer([(0, 1 + i, key)], choice.payload, blocking=True)
        rig.worker.submit(transfer, store=True)
        rig.storage.poison([1 + i])
        assert rig.worker.poll().finished == [transfer.transfer_id]
        rig.tier.settled(transfer, store=True, ok=True)
    for key, content in contents.items():
        assert rig.load((0, 9, key))[0]
        assert rig.storage.content((0,), 9) == content
    rig.end()


def test_a_store_and_a_load_of_one_plan(tmp_path: Path) -> None:
    """What is loaded was stored, or pushed on to disk, by a store of the same plan."""
    layout = kit.make_layout()
    rig = kit.Rig(layout, kit.options(2, layout, disk=4, path=tmp_path))
    wanted = {key: rig.storage.content((0,), 1 + i) for i, key in enumerate((b"a", b"b", b"c"))}
    rig.store((0, 1, b"a"))
    choice = rig.tier.store([b"b", b"c"])
    store = rig.transfer([(0, 2, b"b"), (0, 3, b"c")], choice.payload, blocking=True)
    how = rig.tier.load([b"a", b"c"])
    load = rig.transfer([(0, 4, b"a"), (0, 5, b"c")], how.payload, blocking=how.blocking)
    assert not how.blocking, "a went to disk"
    rig.worker.submit(store, store=True)
    rig.worker.submit(load, store=False)
    ended = rig.worker.poll().finished
    while len(ended) < 2:
        ended += rig.wait().finished
    assert sorted(ended) == [store.transfer_id, load.transfer_id]
    assert rig.storage.content((0,), 4) == wanted[b"a"]
    assert rig.storage.content((0,), 5) == wanted[b"c"]
    rig.end()


def test_a_load_of_what_was_never_stored_names_the_blocks() -> None:
    """A store may be lost with a step that broke off."""
    layout = kit.make_layout(((0,), (1,)))
    rig = kit.Rig(layout, kit.options(8, layout))
    rig.store((0, 1, b"0a"), (1, 2, b"1a"))
    lost = rig.tier.store([b"0b", b"1b"])
    rig.tier.settled(rig.transfer([(0, 3, b"0b"), (1, 4, b"1b")], lost.payload, blocking=True), store=True, ok=True)
    ok, bad = rig.load((0, 11, b"0a"), (0, 12, b"0b"), (1, 13, b"1a"), (1, 14, b"1b"))
    assert not ok
    assert bad == [[12], [14]]
    assert not rig.tier.holds(b"0b")
    assert rig.load((0, 11, b"0a"), (1, 13, b"1a"))[0]


def test_content_from_before_a_reset_is_not_loaded() -> None:
    layout = kit.make_layout()
    rig = kit.Rig(layout, kit.options(1, layout))
    rig.store((0, 1, b"a"))
    rig.tier.reset()
    assert not rig.tier.holds(b"a")
    lost = rig.tier.store([b"a"])
    rig.tier.settled(rig.transfer([(0, 3, b"a")], lost.payload, blocking=True), store=True, ok=True)
    assert rig.load((0, 2, b"a")) == (False, [[2]])


def test_a_transfer_that_does_not_fit_its_payload_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    layout = kit.make_layout()
    rig = kit.Rig(layout, kit.options(4, layout))
    endpoints = TransferEndpoints([rig.worker], 1)
    payload = encode(Moves(1, 0, [0, 1]))
    plan = StepPlan(1, stores=[rig.transfer([(0, 1, b"a")], payload, blocking=True)])
    with caplog.at_level(logging.ERROR):
        endpoints.start_stores(plan)
    assert endpoints.has_news
    assert "has 1 blocks for 2 places" in caplog.text
    assert rig.store((0, 1, b"a")) == [True]


def test_host_memory_is_not_touched_before_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    layout = kit.make_layout()
    before = resident()
    rig = kit.Rig(layout, kit.OffloadOptions(host_memory="4GiB"))
    rig.store((0, 1, b"a"))
    assert rig.load((0, 2, b"a"))[0]
    assert rig.tier.stats().capacity == 2**32 // 192
    assert resident() - before < 2**28


def test_memory_that_is_not_there_is_named() -> None:
    layout = kit.make_layout()
    worker = OffloadWorker(kit.context(layout), kit.OffloadOptions(host_memory="900PiB"))
    with pytest.raises(TrivetError, match=r"offload.host_memory: .*PiB cannot be allocated .*; set it lower"):
        worker.bind(kit.Storage(layout))


def test_storage_larger_than_the_layout_says_is_refused() -> None:
    layout, larger = kit.make_layout(), kit.make_layout(dim=100)
    worker = OffloadWorker(kit.context(layout), kit.options(4, layout))
    with pytest.raises(TrivetError, match="the attention plugin keeps blocks of 6400 bytes where the KV layout says"):
        worker.bind(kit.Storage(larger))


def test_arrays_of_numpy_are_shared() -> None:
    class Arrays:
        def __init__(self) -> None:
            self.words = np.arange(160, dtype=np.uint64).reshape(40, 4, 1, 1)

        def kv(self, layer: int) -> tuple[Any, Any]:
            return self.words, self.words

    arrays = Arrays()
    layout = kit.make_layout(heads=1, dim=2)
    rig = kit.Rig(layout, kit.options(4, layout), arrays)
    rig.store((0, 3, b"a"))
    expected = arrays.words[3].copy()
    arrays.words[:] = 0
    assert rig.load((0, 5, b"a"))[0]
    assert (arrays.words[5] == expected).all()
    assert not arrays.words[:5].any()


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 2, 3, 1), (3, 0, 1, 2), (1, 0, 2, 3)])
def test_storage_may_have_its_axes_in_any_order(order: tuple[int, ...]) -> None:
    """``order``: the axes of blocks, positions, heads and head dimension as they lie in memory."""

    class Axes:
        def __init__(self) -> None:
            shape = (40, 4, 2, 3)
            memory = torch.randn(*(shape[axis] for axis in order), 2)
            back = [order.index(axis) for axis in range(4)]
            self.parts = tuple(memory[..., i].permute(*back) for i in range(2))

        def kv(self, layer: int) -> tuple[torch.Tensor, ...]:
            return self.parts

    axes = Axes()
    layout = kit.make_layout()
    rig = kit.Rig(layout, kit.options(4, layout), axes)
    rig.store((0, 3, b"a"))
    expected = [part.clone() for part in axes.parts]
    for part, whole in zip(axes.parts, expected, strict=True):
        part[[3, 5]] = 0
        whole[5], whole[3] = whole[3].clone(), 0
    assert rig.load((0, 5, b"a"))[0]
    assert all(torch.equal(part, whole) for part, whole in zip(axes.parts, expected, strict=True))


def test_a_device_that_it_does_not_know_is_refused() -> None:
    layout = kit.make_layout()
    storage = kit.Storage(layout)
    storage.layers = {layer: (k.to("meta"), v.to("meta")) for layer, (k, v) in storage.layers.items()}
    worker = OffloadWorker(kit.context(layout), kit.options(4, layout))
    with pytest.raises(TrivetError, match="serves KV caches on cpu and cuda, not on meta; remove it from"):
        worker.bind(storage)
