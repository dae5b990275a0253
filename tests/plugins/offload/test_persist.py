"""What is still in the pool when an engine is shut down is found by the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trivet.engine import Engine
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_schemas.sampling import SamplingParams

FAKE: dict[str, Any] = {role: {"use": "fake"} for role in ("attention", "sampler", "runner", "tokenizer")}
WORK = [[(11 * i + 3 * j) % 60 for j in range(41)] for i in range(5)]


def life(path: Path, windows: list[int | None], blocks: int, *, host: str = "1MiB", **options: Any) -> Any:
    """An engine that answers all prompts; returns how many of each prompt's tokens it found, and the tier's figures."""
    tier = {"use": "offload", "host_memory": host, "path": str(path), "disk_memory": "8MiB"} | options
    roles = FAKE | {
        "model": {"use": "fake", "windows": windows},
        "executor": {"use": "inline"},
        "scheduler": {"use": "continuous", "max_num_seqs": 4},
        "cache": {"use": "paged", "block_size": 4, "num_blocks": 1 + blocks * len(windows)},
        "cache_tier": [tier],
    }
    engine = Engine({"model": "fake", "max_model_len": 64, "plugins": roles}, [fakes])
    tier_half = engine.context.all("cache_tier")[0]
    try:
        done = {}
        for i, prompt in enumerate(WORK):
            engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
            while engine.has_work:
                for end in engine.step().finished:
                    done[end.request.request_id] = end.request
        engine.check_integrity()
    finally:
        engine.shutdown()
    for i, prompt in enumerate(WORK):
        assert done[str(i)].output_ids == reference_tokens(prompt, 6, windows=windows)
    return [done[str(i)].num_cached_tokens for i in range(len(WORK))], tier_half.stats()


@pytest.mark.parametrize("windows", [[None], [None, 6, None]], ids=str)
@pytest.mark.parametrize("blocks", [18, 80], ids=["evicting", "ample"])
def test_a_restart_finds_what_the_pool_had(tmp_path: Path, windows: list[int | None], blocks: int) -> None:
    found, figures = life(tmp_path, windows, blocks)
    assert found == [0] * 5
    assert figures.stored > 0
    assert life(tmp_path, windows, blocks)[0] == [40] * 5
    assert life(tmp_path, windows, blocks)[0] == [40] * 5


def test_what_came_last_is_kept_where_there_is_little_room(tmp_path: Path) -> None:
    """Room for two or three of the five prompts, in memory and on disk together."""
    assert life(tmp_path, [None], 80, host="512B", disk_memory="180KiB")[0] == [0] * 5
    found = life(tmp_path, [None], 80, host="512B", disk_memory="180KiB")[0]
    assert sum(found) > 0, "some of it is found"
    assert found[0] == 0, "but not what came first"


def test_without_persist_the_pool_is_lost(tmp_path: Path) -> None:
    assert life(tmp_path, [None], 80, persist=False)[0] == [0] * 5
    assert life(tmp_path, [None], 80, persist=False)[0] == [0] * 5


def test_a_store_that_fails_at_the_shutdown_costs_content_only(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    from trivet_paged.tiers import TierTraffic

    def broken(*_: Any) -> bool:
        raise OSError("no")

    monkeypatch.setattr(TierTraffic, "persist", broken)
    assert life(tmp_path, [None], 80)[0] == [0] * 5
    assert "not all of the KV cache could be stored" in caplog.text


def test_more_evictions_in_a_step_than_host_memory_holds_are_counted_and_told_once(tmp_path: Path, caplog: Any) -> None:
    """Prompts of 11 blocks push each other out of a pool of 18, through host memory of 8."""
    _, figures = life(tmp_path, [None], 18, host="512B")
    assert figures.refused >= 3
    assert caplog.text.count("raise its host_memory") == 1
    caplog.clear()
    _, figures = life(tmp_path / "ample", [None], 18)
    assert figures.refused == 0
    assert "raise its host_memory" not in caplog.text
