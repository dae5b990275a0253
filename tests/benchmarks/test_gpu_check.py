"""The script for a GPU runs in Triton's interpreter, says what fails, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(command: list[str], out: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, object]]]:
    environment = os.environ | {"OUT": str(out), "PYTHONPATH": str(BENCHMARKS), "PYTHON": sys.executable}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return ran, json.loads((out / "gpu_check.json").read_text())["parts"]


def test_kernels_are_checked_and_timed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    parts = ["attention", "cache", "ops", "logits", "ceilings", "speed", "tune"]
    options = ["--interpret", "--quick", "--seed", "5", "--only", ",".join(parts)]
    ran, results = run([str(BENCHMARKS / "gpu_check.sh"), *options], tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all parts passed" in ran.stdout
    assert list(results) == parts
    for name in parts[:4]:
        errors = results[name]["results"]["errors"]  # type: ignore[index]
        assert errors
        assert max(errors.values()) < 1e-2
    lines = results["speed"]["results"]["lines"]  # type: ignore[index]
    assert [line["kind"] for line in lines] == ["decode", "prefill"]
    assert all(line["us"] > 0 and line["sdpa_us"] > 0 for line in lines)


FAULTY = """
import sys, time, types, torch
import gpu_check
from _gpu_correctness import Checks

def wrong(args, results):
    checks = Checks(results)
    checks.near("good", torch.ones(3), torch.ones(3))
    checks.near("bad", torch.tensor([1.0, torch.nan]), torch.ones(2))
    checks.equal("other", torch.ones(3), torch.zeros(3))
    checks.conclude()

def slow(args, results):
    while True:
        time.sleep(0.01)

def good(args, results):
    results["answer"] = 42

sys.modules["parts"] = types.SimpleNamespace(wrong=wrong, slow=slow, good=good)
gpu_check.PARTS = {"wrong": ("parts", "wrong", 5), "slow": ("parts", "slow", 1), "good": ("parts", "good", 5)}
gpu_check._device = lambda device: "no device"
sys.exit(gpu_check.main(["--only", "wrong,slow,good"]))
"""


def test_a_part_that_fails_or_takes_too_long_is_reported_and_the_others_run(tmp_path: Path) -> None:
    ran, results = run([sys.executable, "-c", FAULTY], tmp_path)
    assert ran.returncode == 1
    assert "failed: wrong, slow" in ran.stdout
    assert [part["ok"] for part in results.values()] == [False, False, True]
    assert results["wrong"]["error"] == "AssertionError: wrong results: bad, other"
    assert results["slow"]["error"] == "OverTimeError: took longer than 1 s"
    assert results["good"]["results"] == {"answer": 42}


def test_an_unknown_part_is_named() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--only", "atention"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "there are no parts atention" in ran.stderr
