"""Preemption storms: everything ends, what is computed again is bounded, and the cheapest victim is the better one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

RunStorm = Callable[..., Any]


@pytest.fixture
def run_storm(monkeypatch: pytest.MonkeyPatch) -> RunStorm:
    monkeypatch.syspath_prepend(str(FOLDER))
    run: RunStorm = importlib.import_module("storm").run_storm
    return run


@pytest.mark.parametrize("victim", ["newest", "least_computed"])
def test_all_requests_end_and_the_share_of_recomputed_tokens_is_bounded(run_storm: RunStorm, victim: str) -> None:
    storm = run_storm(victim, longest=64, max_recomputed_share=0.1)
    assert storm.finished == storm.requests == 64
    assert storm.preemptions > 0
    # What runs when the bound is reached may still be preempted.
    assert 0 < storm.recomputed_share <= 0.12
    assert storm.most_preemptions <= 6


def test_the_cheapest_victim_costs_less_than_the_newest(run_storm: RunStorm) -> None:
    newest, cheapest = (
        [run_storm(victim, seed=seed, longest=64, max_recomputed_share=1) for seed in range(3)]
        for victim in ("newest", "least_computed")
    )
    assert all(storm.finished == 64 for storm in newest + cheapest)
    assert sum(s.recomputed for s in cheapest) < 0.9 * sum(s.recomputed for s in newest)
    assert sum(s.steps for s in cheapest) < sum(s.steps for s in newest)


def test_a_line_per_storm_and_per_victim() -> None:
    options = ["--requests", "6", "--seeds", "2", "--victims", "newest,least_priority", "--share", "0.5"]
    command = [sys.executable, str(FOLDER / "storm.py"), *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["victim"], line.get("seed")) for line in lines] == [
        *[("newest", 0), ("newest", 1), ("least_priority", 0), ("least_priority", 1)],
        *[("newest", None), ("least_priority", None)],
    ]
    assert all(line["finished"] == 6 for line in lines[:4])
    assert all(0 <= line["recomputed_share"] < 1 for line in lines)
