"""Starts that cannot succeed name the option, and leave nothing behind that would be in the way of the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offload_kit import Rig, make_layout, options
from test_engine import engine

import trivet_offload.segments as segments
from trivet.errors import TrivetError
from trivet_offload.segments import SegmentPlan, SegmentStore


@pytest.mark.parametrize(
    ("tier", "named"),
    [
        ({"host_memory": 0}, "host_memory: 0B"),
        ({"host_memory": 2**70}, "host_memory: "),
        ({"policy": "none"}, "policy: unknown tier_policy 'none'"),
        ({"path": ""}, "path: ''"),
        ({"path": "a\0b"}, "path: "),
        ({"path": "~nobody-of-this-name/kv"}, "path: '~nobody"),
        ({"path": "/dev/null"}, "path: '/dev/null'"),
        ({"path": "kv", "disk_memory": 2**70}, "disk_memory: "),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, monkeypatch: Any, tier: dict[str, Any], named: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrivetError) as caught, engine(**tier):
        pass
    assert f"plugins.cache_tier.offload.{named}" in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_a_start_that_fails_lets_the_folder_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SegmentPlan.of(64, 1 << 20)

    def fail(*_: Any) -> Any:
        raise MemoryError("too many entries")

    with monkeypatch.context() as patched:
        patched.setattr(segments, "read_tables", fail)
        with pytest.raises(MemoryError):
            SegmentStore(tmp_path / "kv", plan, b"x" * 32, "kv")
    store = SegmentStore(tmp_path / "kv", plan, b"x" * 32, "kv")
    assert store.write(0, 0, b"key", np.zeros(64, np.uint8))
    store.close()


def test_memory_that_is_promised_but_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout()
    monkeypatch.setattr("trivet_offload.movers.free_ram", lambda: 1000)
    with pytest.raises(TrivetError, match=r"host_memory: .* cannot be allocated \(1000B are free\)"):
        Rig(layout, options(100, layout))
