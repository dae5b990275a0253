"""The script that measures latency beside long prompts, on a model that costs nothing."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trivet.engine
from trivet.testing import fakes

ROLES = {role: {"use": "fake"} for role in ("model", "attention", "sampler", "runner", "tokenizer")}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    real = trivet.engine.Engine

    def fake(config: dict[str, Any]) -> trivet.engine.Engine:
        cache = {"use": "paged", "block_size": 4}
        return real(config | {"plugins": config["plugins"] | ROLES | {"cache": cache}}, [fakes])

    monkeypatch.setattr(trivet.engine, "Engine", fake)
    return importlib.import_module("latency_mix")


def test_a_line_per_case_and_a_plot(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "latency.svg"
    options = ["--dtype", "float32", "--streams", "2", "--steps", "4", "--length", "60", "--mixed", "20", "--overlap"]
    monkeypatch.setattr(sys, "argv", ["latency_mix.py", "fake", *options, "--plot", str(plot)])
    script.main()
    lines = {line["case"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(lines) == ["static", "adaptive", "none", "overlap"]
    assert lines["static"]["max_num_mixed_prefill_tokens"] == 20
    assert lines["adaptive"]["target_inter_token_latency"] > 0
    for case in ("static", "adaptive", "none"):
        assert 0 < lines[case]["undisturbed_ms"]["p50"] <= lines[case]["undisturbed_ms"]["p99"]
        assert lines[case]["first_token_s"] >= 0
    assert lines["overlap"]["speedup"] > 0
    assert "<svg" in plot.read_text()


def test_a_prompt_is_computed_in_as_many_steps_as_the_bound_says(script: ModuleType) -> None:
    from argparse import Namespace

    args = Namespace(streams=2, model="fake", dtype="float32", length=60, seed=0)
    counts = {}
    for mixed in (20, None):
        streams = script.Streams(args, max_num_mixed_prefill_tokens=mixed, max_num_batched_tokens=64)
        gaps, waits = streams.disturb(1)
        counts[mixed] = len(gaps)
        assert len(waits) == 1
        streams.close()
    assert counts == {20: 2 * 3, None: 2 * 1}
