"""The script for a GPU runs in Triton's interpreter, compiles without a GPU, says what fails, and always ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(command: list[str], out: Path, **changes: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    environment = os.environ | {"OUT": str(out), "PYTHONPATH": str(BENCHMARKS), "PYTHON": sys.executable} | changes
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return ran, json.loads((out / "gpu_check.json").read_text())["parts"]


def test_every_part_runs_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    ran, results = run([str(BENCHMARKS / "gpu_check.sh"), "--interpret", "--quick", "--seed", "5"], tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all parts passed" in ran.stdout
    assert all(part["state"] == "ok" for part in results.values())
    found = {name: part["results"] for name, part in results.items()}
    for name in ("attention", "cache", "ops", "experts", "quantized", "logits", "sampling"):
        errors = found[name]["errors"]
        assert errors
        assert max(errors.values()) < 1e-2
    lines = found["speed"]["lines"]
    assert [line["kind"] for line in lines] == ["decode", "prefill"]
    assert all(line["us"] > 0 and line["sdpa_us"] > 0 for line in lines)
    assert {line["what"] for line in found["sampling_speed"]["lines"]} > {"greedy", "top-p 0.95", "logprobs"}
    for name in ("decode", "decode_1b"):
        assert [line["batch"] for line in found[name]["eager"]] == [2]
    assert {line["weights"] for line in found["products"]["lines"]} == {"bfloat16", "int8", "int4"}
    assert found["flex"]["us"] > 0


PARTS = """
import signal, sys, time, types, torch
import gpu_check
from gpu_check import Part

def wrong(args, results):
    from _gpu_correctness import Checks
    checks = Checks(args, results)
    checks.near("good", torch.ones(3), torch.ones(3))
    checks.near("bad", torch.tensor([1.0, torch.nan]), torch.ones(2))
    checks.equal("other", torch.ones(3), torch.zeros(3))
    checks.conclude()

def slow(args, results):
    results["first"] = 1
    try:
        while True:
            time.sleep(0.01)
    except Exception:
        results["swallowed"] = True

def deaf(args, results):
    results["first"] = 1
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)

def broken(args, results):
    raise RuntimeError("no such thing")

def good(args, results):
    results["answer"] = 42

sys.modules["parts"] = types.SimpleNamespace(wrong=wrong, slow=slow, deaf=deaf, broken=broken, good=good)
gpu_check.PARTS = {
    name: Part("parts", name.rstrip("!"), 1 if "slow" in name else 5, name.endswith("!"))
    for name in ("wrong!", "slow", "slow!", "deaf", "deaf!", "broken", "broken!", "good")
}
gpu_check.RESERVE = 0
gpu_check._device = lambda device: "no device"
sys.exit(gpu_check.main(sys.argv[1:]))
"""


def run_parts(names: str, out: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    return run([sys.executable, "-c", PARTS, "--only", names, *options], out)


def test_a_wrong_result_is_reported_and_the_other_parts_run(tmp_path: Path) -> None:
    ran, results = run_parts("wrong!,broken!,broken,slow,good", tmp_path)
    assert ran.returncode == 1
    assert ran.stdout.endswith("wrong: wrong!, broken!\nfailed: broken\nout of time: slow\n")
    assert [part["state"] for part in results.values()] == ["wrong", "wrong", "failed", "out of time", "ok"]
    assert results["wrong!"]["error"] == "AssertionError: wrong results: bad, other"
    assert results["broken"]["error"] == "RuntimeError: no such thing"
    assert results["slow"]["error"] == "took longer than 1 s"
    assert results["slow"]["results"] == {"first": 1}
    assert results["good"]["results"] == {"answer": 42}


def test_neither_too_little_time_nor_what_is_no_check_makes_it_fail(tmp_path: Path) -> None:
    ran, results = run_parts("slow!,broken,good", tmp_path)
    assert ran.returncode == 0
    assert [part["state"] for part in results.values()] == ["out of time", "failed", "ok"]


@pytest.mark.parametrize(("part", "code"), [("deaf", 0), ("deaf!", 1)])
def test_a_part_that_does_not_answer_ends_with_the_budget(tmp_path: Path, part: str, code: int) -> None:
    """As one would that waits for a device for ever: a check that never ends is a wrong one."""
    ran, results = run_parts(f"good,{part},slow", tmp_path, "--budget", "3")
    assert ran.returncode == code
    assert results["good"]["state"] == "ok"
    assert results[part]["results"] == {"first": 1}
    assert "slow" not in results


def test_the_parts_fit_into_the_budget() -> None:
    script = "import gpu_check; print(gpu_check.RESERVE + sum(part.seconds for part in gpu_check.PARTS.values()))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=BENCHMARKS, check=True)
    assert int(ran.stdout) <= 300


COMPILE = """
import argparse, os, sys
from pathlib import Path
import torch, triton
import _gpu_compile

def main():
    args = argparse.Namespace(device="cuda", interpret=False, quick=True, seed=1, only=["cache", "ops"])
    launches = _gpu_compile.noted(lambda: _gpu_compile._launch_all(args), "sm_90")
    names = ("copy_kernel", "norm_kernel")
    some = [next(launch for launch in launches if launch.name == name) for name in names]
    target = _gpu_compile.Target("cuda", 90, 32)
    done = list(_gpu_compile.compiled([*some, some[0]._replace(name="no_kernel")], target))
    assert sorted((name, error is None) for name, _, error in done) == [
        ("copy_kernel", True), ("no_kernel", False), ("norm_kernel", True)
    ], done
    found = sorted(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*"))
    assert len([path for path in found if path.suffix == ".cubin"]) == 2, found
    # A launch of the same kernels with tensors in place of their descriptions finds them there.
    from trivet_kernels.triton.ops import TritonOps
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.driver.set_active(_gpu_compile._NoDevice(target))
    triton.runtime.jit.JITFunction.run = lambda *a, warmup, **k: run(*a, warmup=True, **k)
    x = torch.empty(5, 80, dtype=torch.bfloat16, device="meta")
    TritonOps().rms_norm(x, torch.empty(80, device="meta"), 1e-6)
    assert sorted(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*")) == found

if __name__ == "__main__":
    main()
"""


def test_what_parts_launch_is_compiled_without_a_device_and_found_in_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text(COMPILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(BENCHMARKS), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_an_unknown_part_is_named() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--only", "atention"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "there are no parts atention" in ran.stderr
