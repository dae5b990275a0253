"""The choice of tiles, and the file that keeps it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from trivet_kernels.triton import measure, tune
from trivet_kernels.triton.attention import shape_of
from trivet_kernels.triton.tune import Shape, Tile, TileCache, Tiles, candidates, choose, default_tiles

SHAPE = Shape(128, 128, 8, 4, "bfloat16", "bfloat16", False, "sm_90")
OTHER = Tiles(Tile(64, 32, 4, 2), Tile(0, 128, 2, 4))


def test_the_fastest_of_both_kernels_is_chosen() -> None:
    options = candidates(SHAPE)
    assert options[0] == default_tiles(SHAPE)
    assert 10 <= len(options) == len(set(options)) <= 16
    prefill, decode, keys = (
        next(tiles for tiles in options[3:] if getattr(tiles, name) != getattr(options[0], name))
        for name in ("prefill", "decode", "min_keys")
    )
    prefills = dict.fromkeys(options, 1.0) | {prefill: 0.5}
    for fastest in (decode, keys):
        decodes = dict.fromkeys(options, 1.0) | {fastest: 0.5}
        chosen = choose(options, prefills.__getitem__, decodes.__getitem__)
        assert chosen == replace(fastest, prefill=prefill.prefill)


def test_what_a_device_cannot_hold_is_passed_over() -> None:
    options = candidates(SHAPE)

    def measure(tiles: Tiles) -> float:
        if tiles != options[0]:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return 1.0

    assert choose(options, measure, measure) == options[0]


def test_when_time_is_up_the_best_so_far_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    options = candidates(SHAPE)
    now = 0.0
    monkeypatch.setattr(tune.time, "monotonic", lambda: now)

    def measure(tiles: Tiles) -> float:
        nonlocal now
        now += 1.0
        return -now  # each is faster than all before it

    # The default takes two measurements, and each other candidate one.
    assert choose(options, measure, measure, limit=4.5).prefill == options[3].prefill
    assert choose(options, measure, measure, limit=0.0) == options[0]


@pytest.mark.parametrize("windowed", [False, True])
def test_measuring_runs_every_candidate_on_calls_of_the_shape(monkeypatch: pytest.MonkeyPatch, windowed: bool) -> None:
    """With a clock in place of a device's, whose times depend on nothing but the tiles."""
    shape = Shape(16, 24, 2, 3, "float32", "float32", windowed, "interpreter")
    wanted = candidates(shape)
    ran: list[tuple[int, Tiles]] = []

    def run(**call: Any) -> None:
        assert shape_of(call["query"], call["key_cache"], call["value_cache"], call["window"]) == shape
        assert call["key_cache"].shape[1] == 8
        ran.append((call["max_query_len"], call["tiles"]))
        attend(**call)

    def clock(calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        queries, tiles = ran[-1]
        return 0.5 if tiles == (wanted[-1] if queries == 1 else wanted[2]) else 1.0

    attend = measure.paged_attention
    monkeypatch.setattr(measure, "_CONTEXT", 20)
    monkeypatch.setattr(measure, "_DECODES", 2)
    monkeypatch.setattr(measure, "paged_attention", run)
    monkeypatch.setattr(measure, "graph_seconds", clock)
    chosen = measure.measured_tiles(shape, 8, torch.device("cpu"))
    assert {tiles for _, tiles in ran} == set(wanted)
    assert {queries for queries, _ in ran} == {1, 20}
    assert chosen == replace(wanted[-1], prefill=wanted[2].prefill)


def test_small_data_is_copied_until_no_cache_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 << 20))
    device = torch.device("cuda", 0)
    assert measure.copies_for(1 << 30, device) == 1
    assert measure.copies_for(100 << 20, device) == 4
    assert measure.copies_for(1, device) == 32


def test_a_choice_is_found_again_by_its_class(tmp_path: Path) -> None:
    TileCache("NVIDIA H200", tmp_path).put(SHAPE, OTHER)
    again = TileCache("NVIDIA H200", tmp_path)
    assert again.get(SHAPE) == OTHER
    assert again.get(replace(SHAPE, head_dim=96, v_head_dim=96, group=3)) == OTHER
    for change in ({"head_dim": 64, "v_head_dim": 64}, {"group": 8}, {"arch": "sm_80"}, {"windowed": True}):
        assert again.get(replace(SHAPE, **change)) is None
    assert TileCache("NVIDIA L4", tmp_path).get(SHAPE) is None


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'{"key": {"prefill": 3}}',
        json.dumps({"k": asdict(OTHER) | {"min_keys": "256"}}).encode(),
        json.dumps({"k": asdict(replace(OTHER, prefill=Tile(64, 48, 4, 2)))}).encode(),
    ],
)
def test_a_damaged_file_is_passed_over_with_a_warning(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = TileCache("gpu", tmp_path).path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "trivet.kernels"):
        cache = TileCache("gpu", tmp_path)
    assert str(path) in caplog.text
    assert cache.get(SHAPE) is None
    cache.put(SHAPE, OTHER)
    assert TileCache("gpu", tmp_path).get(SHAPE) == OTHER


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tiles").write_text("a file where a folder should be")
    cache = TileCache("gpu", tmp_path / "tiles")
    with caplog.at_level(logging.WARNING, "trivet.kernels"):
        cache.put(SHAPE, OTHER)
    assert "cannot be kept" in caplog.text
    assert cache.get(SHAPE) == OTHER


def test_a_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert TileCache("gpu").path.parent == tmp_path / "home" / ".cache" / "trivet" / "tiles"
