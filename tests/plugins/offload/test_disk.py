"""What is on disk survives a restart and a kill; whatever happens to the files is a miss."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import offload_kit as kit
import pytest

from trivet.errors import TrivetError
from trivet_offload import segments, worker
from trivet_offload.segments import SegmentPlan, SegmentStore, read_index

LAYOUT = kit.make_layout()
SIZE = 192
KEYS = [b"key %d" % i for i in range(12)]


def make_rig(path: Path, slots: int = 2, disk: int = 30, **details: Any) -> kit.Rig:
    fields = {name: details.pop(name) for name in ("namespace", "persist") if name in details}
    layout = details.pop("layout", LAYOUT)
    return kit.Rig(layout, kit.options(slots, layout, disk=disk, path=path, **fields), **details)


def fill(path: Path, **fields: Any) -> dict[bytes, bytes]:
    """An engine's life: twelve blocks, of which two stay in memory until its end; returns their contents."""
    rig = make_rig(path, **fields)
    for i, key in enumerate(KEYS):
        rig.store((0, 1 + i, key))
    contents = {key: rig.storage.content((0,), 1 + i) for i, key in enumerate(KEYS)}
    rig.end()
    return contents


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*/rank*/segment-*.kv"))


def found(rig: kit.Rig, contents: dict[bytes, bytes]) -> list[bytes]:
    """The keys that are there, each of which is loaded and compared."""
    there = [key for key in KEYS if rig.tier.holds(key)]
    good = []
    for key in there:
        rig.storage.poison([30])
        ok, bad = rig.load((0, 30, key))
        if ok:
            assert rig.storage.content((0,), 30) == contents[key]
            good.append(key)
        else:
            assert bad == [[30]]
            assert not rig.tier.holds(key)
    return good


# ---------------------------------------------------------------------- restarts


def test_everything_is_found_after_a_restart(tmp_path: Path) -> None:
    contents = fill(tmp_path)
    rig = make_rig(tmp_path)
    assert rig.tier.stats().held == 12
    assert found(rig, contents) == KEYS
    rig.end()
    rig = make_rig(tmp_path)
    assert found(rig, contents) == KEYS
    rig.end()


def test_without_persist_only_what_was_evicted_from_memory_is_found(tmp_path: Path) -> None:
    contents = fill(tmp_path, persist=False)
    rig = make_rig(tmp_path)
    assert found(rig, contents) == KEYS[:-2]
    rig.end()


def test_at_shutdown_the_newest_content_gets_the_room_there_is(tmp_path: Path) -> None:
    contents = fill(tmp_path, slots=10, disk=5)
    rig = make_rig(tmp_path, disk=5)
    assert found(rig, contents) == [*KEYS[:2], *KEYS[-3:]]
    rig.end()


def test_the_order_of_use_survives(tmp_path: Path) -> None:
    fill(tmp_path, slots=1, disk=12)
    rig = make_rig(tmp_path, slots=1, disk=12)
    for i in range(4):
        rig.store((0, 1, b"new %d" % i))
    assert [key for key in KEYS if not rig.tier.holds(key)] == KEYS[:3]
    rig.end()


def test_a_reset_is_for_good(tmp_path: Path) -> None:
    contents = fill(tmp_path)
    rig = make_rig(tmp_path)
    rig.tier.reset()
    assert found(rig, contents) == []
    rig.end()
    rig = make_rig(tmp_path)
    assert rig.tier.stats().held == 0
    rig.store((0, 1, b"a"), (0, 2, b"b"))
    rig.tier.reset()
    rig.end()
    rig = make_rig(tmp_path)
    assert rig.tier.stats().held == 0
    for i, key in enumerate(KEYS):
        rig.store((0, 1 + i, key))
    rig.end()
    rig = make_rig(tmp_path)
    assert rig.tier.stats().held == 12
    rig.end()


def test_an_unreadable_number_of_resets_hides_everything(tmp_path: Path) -> None:
    fill(tmp_path)
    (next(tmp_path.iterdir()) / "generation").write_text("many")
    rig = make_rig(tmp_path)
    assert rig.tier.stats().held == 0
    rig.end()


MORE = [b"more %d" % i for i in range(12)]
CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_disk as t
rig = t.make_rig(Path(sys.argv[2]), slots=1)
for i, key in enumerate(t.KEYS):
    rig.store((0, 1 + i, key))
rig.store((0, 30, b"last"))
while rig.worker._background._jobs:
    pass
print("written", flush=True)
while True:
    for i, key in enumerate(t.MORE):
        rig.tier.forget([key])
        rig.store((0, 1 + i, key))
"""


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    child = subprocess.Popen([sys.executable, "-c", CHILD, here, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    time.sleep(random.random() / 10)  # while it goes on writing
    os.kill(child.pid, signal.SIGKILL)
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    storage = kit.Storage(LAYOUT)
    contents = {key: storage.content((0,), 1 + i) for keys in (KEYS, MORE) for i, key in enumerate(keys)}
    rig = make_rig(tmp_path, slots=1)  # the lock of a killed process is no obstacle
    assert found(rig, contents) == KEYS
    for key in MORE:
        if rig.tier.holds(key):
            assert rig.load((0, 30, key))[0], "an entry in the table is valid at any moment"
            assert rig.storage.content((0,), 30) == contents[key]
    rig.end()


def test_a_second_engine_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    with pytest.raises(TrivetError) as refused:
        make_rig(tmp_path)
    message = str(refused.value)
    assert f"plugins.cache_tier.offload.path: '{tmp_path}' is in use by another engine" in message
    assert f"process {os.getpid()}" in message
    assert "give this one another path or namespace" in message
    other = make_rig(tmp_path, namespace="another")
    other.end()
    rig.end()
    make_rig(tmp_path).end()


def test_ranks_have_folders_of_their_own(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    second = kit.OffloadWorker(kit.context(LAYOUT, rank=1), rig.options)
    second.bind(rig.storage)
    second.shutdown()
    rig.end()
    assert sorted(p.name for p in tmp_path.glob("*/rank*")) == ["rank0", "rank1"]


# ---------------------------------------------------------------------- other engines


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "b"},
        {"model": "other"},
        {"device": "cuda"},
        {"layout": kit.make_layout(dtype="bfloat16", dim=6)},
        {"layout": kit.make_layout(heads=3, dim=2)},
    ],
    ids=["namespace", "model", "device", "dtype", "heads"],
)
def test_content_is_used_by_the_same_model_and_layout_only(tmp_path: Path, change: dict[str, Any]) -> None:
    fill(tmp_path)
    layout = change.get("layout", LAYOUT)
    rig = make_rig(tmp_path, **change)
    assert rig.tier.stats().held == 0
    assert len(list(tmp_path.iterdir())) == 2
    assert layout is rig.layout
    rig.end()


def test_a_model_whose_files_were_replaced_is_another_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    fill(tmp_path / "kv", model=str(model))
    rig = make_rig(tmp_path / "kv", model=str(model))
    assert rig.tier.stats().held == 12
    rig.end()
    (model / "model.safetensors").write_bytes(b"others!")
    os.utime(model / "model.safetensors", (1, 1))
    rig = make_rig(tmp_path / "kv", model=str(model))
    assert rig.tier.stats().held == 0
    rig.end()


# ---------------------------------------------------------------------- damage


def test_a_corrupt_byte_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    contents = fill(tmp_path)
    (file,) = files(tmp_path)
    raw = bytearray(file.read_bytes())
    at = raw.find(contents[KEYS[3]])
    raw[at + 17] ^= 1
    file.write_bytes(raw)
    rig = make_rig(tmp_path)
    assert rig.tier.holds(KEYS[3]), "nothing is read before it is wanted"
    assert found(rig, contents) == [key for key in KEYS if key != KEYS[3]]
    assert "is damaged" in caplog.text
    rig.end()
    rig = make_rig(tmp_path)
    assert not rig.tier.holds(KEYS[3]), "it was taken out of the table"
    rig.end()


def test_a_file_that_is_cut_off_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    contents = fill(tmp_path)
    (file,) = files(tmp_path)
    os.truncate(file, file.stat().st_size - 1)
    rig = make_rig(tmp_path)
    assert rig.tier.stats().held == 0
    assert "will be made anew: it is cut off" in caplog.text
    rig.end()
    assert fill(tmp_path) == contents
    rig = make_rig(tmp_path)
    assert found(rig, contents) == KEYS
    rig.end()


@pytest.mark.parametrize("content", [b"", b"not a segment", b"x" * 100_000])
def test_a_foreign_file_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    fill(tmp_path)
    (file,) = files(tmp_path)
    file.write_bytes(content)
    rig = make_rig(tmp_path)
    assert rig.tier.stats().held == 0
    assert "is damaged, or of another model or layout" in caplog.text
    rig.end()


def test_a_missing_file_is_missing_content(tmp_path: Path) -> None:
    contents = fill(tmp_path)
    files(tmp_path)[0].unlink()
    rig = make_rig(tmp_path)
    assert rig.tier.stats().held == 0
    rig.end()
    fill(tmp_path)
    rig = make_rig(tmp_path)
    assert found(rig, contents) == KEYS
    rig.end()


def test_a_file_that_is_cut_off_while_in_use_is_a_miss(tmp_path: Path) -> None:
    contents = fill(tmp_path)
    rig = make_rig(tmp_path)
    assert rig.load((0, 20, KEYS[0]))[0]
    (file,) = files(tmp_path)
    os.truncate(file, 4096)
    there = found(rig, contents)
    assert KEYS[0] in there, "it is in memory by now"
    assert len(there) < 4
    rig.end()


def test_files_stay_within_the_size_of_the_tier(tmp_path: Path) -> None:
    plan = SegmentPlan.of(SIZE, 10 * 16384, 16384)
    assert plan.num_segments > 3
    folder = tmp_path / "rank0"
    store = SegmentStore(folder, plan, b"f" * 32, "option")
    rng = np.random.default_rng(0)
    rows = {place: rng.integers(0, 256, SIZE, np.uint8) for place in range(0, plan.num_slots, 3)}
    for place, row in rows.items():
        assert store.write(place, 0, b"%d" % place, row)
    store.close()
    assert sum(file.stat().st_size for file in folder.glob("*.kv")) <= 10 * 16384
    assert read_index(folder, plan, b"f" * 32, 0) == {place: b"%d" % place for place in rows}
    smaller = SegmentPlan.of(SIZE, 2 * 16384, 16384)
    store = SegmentStore(folder, smaller, b"f" * 32, "option")
    assert sum(file.stat().st_size for file in folder.glob("*.kv")) <= 2 * 16384, "what is too much is removed"
    content = np.empty(SIZE, np.uint8)
    kept = [place for place in rows if place < smaller.num_slots]
    assert all(store.read(place, 0, b"%d" % place, content) and (content == rows[place]).all() for place in kept)
    store.close()


def test_only_so_many_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MOST_OPEN", 2)
    plan = SegmentPlan.of(SIZE, 8 * 16384, 16384)
    store = SegmentStore(tmp_path, plan, b"f" * 32, "option")
    before = len(list(Path("/proc/self/fd").iterdir()))
    row = np.arange(SIZE, dtype=np.uint8)
    for place in range(plan.num_slots):
        assert store.write(place, 0, b"%d" % place, row)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4
    assert all(store.read(place, 0, b"%d" % place, row) for place in range(plan.num_slots))
    store.close()


# ---------------------------------------------------------------------- disks that do not work


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A disk on which ``room`` bytes may be written."""
    state = {"room": 0}
    real = os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if len(data) > state["room"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        state["room"] -= len(data)
        return real(file, data, offset)

    monkeypatch.setattr(segments.os, "pwrite", pwrite)
    return state


def test_a_full_disk_is_reported_once_and_costs_the_blocks_only(
    tmp_path: Path, full_disk: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    full_disk["room"] = 2500
    with caplog.at_level(logging.WARNING):
        contents = fill(tmp_path)
    assert caplog.text.count("cannot be written to") == 1
    full_disk["room"] = 1 << 30
    rig = make_rig(tmp_path)
    there = found(rig, contents)
    assert 0 < len(there) < 10
    rig.end()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(TrivetError) as refused:
        make_rig(occupied)
    assert f"plugins.cache_tier.offload.path: '{occupied}' cannot be used" in str(refused.value)
    assert "name a folder that can be written to" in str(refused.value)


def test_a_disk_that_is_too_slow_drops_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_LEAST_WAITING", 1)
    monkeypatch.setattr(worker, "_DRAIN_SECONDS", 5.0)
    real = SegmentStore.write
    open_gate: list[bool] = []

    def write(self: Any, *args: Any) -> bool:
        while not open_gate:
            time.sleep(0.001)
        return real(self, *args)

    monkeypatch.setattr(SegmentStore, "write", write)
    rig = make_rig(tmp_path, slots=1, persist=False)
    contents = {}
    for i, key in enumerate(KEYS):
        contents[key] = rig.storage.content((0,), 1 + i)
        rig.store((0, 1 + i, key))
    assert caplog.text.count("the disk is slower than blocks are evicted") == 1
    open_gate.append(True)
    assert rig.load((0, 20, KEYS[-1]))[0], "it is in memory"
    assert rig.load((0, 21, KEYS[0]))[0], "it was the first to be written"
    assert not rig.load((0, 22, KEYS[5]))[0]
    assert len(found(rig, contents)) < 6
    rig.end()


def test_a_shutdown_waits_for_a_stuck_disk_no_longer_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_DRAIN_SECONDS", 0.01)
    stuck: list[bool] = [True]

    def write(self: Any, *args: Any) -> bool:
        while stuck:
            time.sleep(0.001)
        return False

    monkeypatch.setattr(SegmentStore, "write", write)
    rig = make_rig(tmp_path, slots=1)
    rig.store((0, 1, b"a"))
    rig.store((0, 2, b"b"))
    thread = rig.worker._background._thread  # type: ignore[union-attr]
    disk = rig.worker._disk
    rig.end()
    assert "the disk is slow; blocks that wait to be written are dropped" in caplog.text
    stuck.clear()
    thread.join()
    assert disk is not None
    disk.close()
