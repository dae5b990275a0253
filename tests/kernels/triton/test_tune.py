"""The choice of tiles, and the file that keeps it."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from triton.runtime.errors import OutOfResources

from trivet_kernels.triton.tune import Shape, Tile, TileCache, Tiles, candidates, choose, default_tiles

SHAPE = Shape(128, 128, 8, 4, "bfloat16", "bfloat16", False, "sm_90")
OTHER = Tiles(Tile(64, 32, 4, 2), Tile(0, 128, 2, 4))


def test_the_fastest_of_both_kernels_is_chosen() -> None:
    options = candidates(SHAPE)
    assert options[0] == default_tiles(SHAPE)
    prefill, decode = options[3].prefill, options[-2].decode
    chosen = choose(
        options,
        lambda tiles: 0.5 if tiles.prefill == prefill else 1.0,
        lambda tiles: 0.5 if tiles.decode == decode else 1.0,
    )
    assert (chosen.prefill, chosen.decode) == (prefill, decode)


def test_what_a_device_cannot_hold_is_passed_over() -> None:
    options = candidates(SHAPE)

    def measure(tiles: Tiles) -> float:
        if tiles != options[0]:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return 1.0

    assert choose(options, measure, measure) == options[0]


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
