"""Engines that take turns: the script that compares them, with Trivet on its fakes beside a stand-in for vLLM."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STAND_IN = """
import json, os, time
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **values):
        self.values = values

class LLM:
    def __init__(self, **values):
        print("engines print things")
        with open({log!r}, "a") as file:
            print(json.dumps(values), file=file)

    def generate(self, prompts, params, use_tqdm):
        with open({log!r}, "a") as file:
            print(json.dumps([len(p["prompt_token_ids"]) for p in prompts]), params[0].values, file=file)
        if len(prompts) == {dies_at}:
            os._exit(3)
        time.sleep(0.05)
        counts = [p.values["max_tokens"] - {missing} for p in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in counts]
"""

#: a tokenizer that knows every id of the workloads
WIDE = """
from trivet.hookspecs import hookimpl
from trivet.provider import Provider
from trivet.testing.fakes import FakeTokenizer

class WideTokenizer(FakeTokenizer):
    size = 150_000

@hookimpl
def trivet_providers():
    return [Provider("tokenizer", "wide", "wide:WideTokenizer")]
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("peers")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages for the engines' processes."""
    packages = tmp_path / "site"
    info = packages / "acme_fakes-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fakes\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[trivet]\nfakes = trivet.testing.fakes\nwide = wide\n", encoding="utf-8")
    (packages / "wide.py").write_text(WIDE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *sys.path]))
    return packages


def stand_in(site: Path, *, missing: int = 0, dies_at: int = -1) -> Path:
    """Install it; returns the file in which it notes what it is told."""
    log = site / "log"
    source = STAND_IN.format(log=str(log), missing=missing, dies_at=dies_at)
    (site / "vllm.py").write_text(source, encoding="utf-8")
    return log


SETTINGS = {"model": "some", "dtype": "bfloat16", "top_p": False, "prefix_caching": False, "options": {}}


def state(peer: Any) -> str:
    """The letter that the system has for what a process does."""
    text = Path(f"/proc/{peer._process.pid}/stat").read_text(encoding="utf-8")
    return text.rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells what a process does")
def test_an_engine_is_stopped_while_others_work_and_ends_when_it_is_told(peers: ModuleType, site: Path) -> None:
    log = stand_in(site)
    peer = peers.Peer("vllm", "vllm", sys.executable, SETTINGS | {"top_p": True})
    try:
        for _ in range(200):
            if state(peer) == "T":
                break
            time.sleep(0.01)
        assert state(peer) == "T"
        assert 0 < peer.load_seconds <= peer.startup_seconds
        assert peer.peak_bytes > 1 << 20
        assert 0.05 <= peer.run([([5, 6, 7], 4), ([8], 2)]) < 5
        assert state(peer) in "TtDRS"
    finally:
        peer.close()
    assert peer._process.returncode == 0
    told = log.read_text(encoding="utf-8").splitlines()
    assert json.loads(told[0])["max_model_len"] == 4096
    assert told[1].startswith("[3, 1] {'max_tokens': 4, 'ignore_eos': True")
    assert "'temperature': 0.8, 'top_p': 0.95" in told[1]


@pytest.mark.parametrize(
    ("fault", "named"),
    [({"missing": 1}, r"outputs of \[3\] tokens were made in place of \[4\]"), ({"dies_at": 1}, "ended with code 3")],
)
def test_an_engine_that_does_less_or_dies_is_named(
    peers: ModuleType, site: Path, fault: dict[str, int], named: str
) -> None:
    stand_in(site, **fault)
    peer = peers.Peer("vllm", "vllm", sys.executable, SETTINGS)
    try:
        with pytest.raises(SystemExit, match=f"vllm.*{named}"):
            peer.run([([5], 4)])
    finally:
        peer.close()


def test_an_engine_that_does_not_start_is_named(peers: ModuleType, site: Path) -> None:
    (site / "vllm.py").write_text("raise ImportError('no such thing')", encoding="utf-8")
    with pytest.raises(SystemExit, match="vllm ended with code 1"):
        peers.Peer("vllm", "vllm", sys.executable, SETTINGS)


def test_trivet_and_a_peer_are_compared(site: Path, tmp_path: Path) -> None:
    log = stand_in(site)
    roles: dict[str, Any] = {role: {"use": "fake"} for role in ("runner", "attention", "sampler")}
    roles["model"] = {"use": "fake", "vocab_size": 150_000, "max_model_len": 4096}
    roles["runner"]["available_bytes"] = 1 << 28
    roles["tokenizer"] = {"use": "wide"}
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "none", "--engines", "trivet,vllm"]
    options = ["--python", f"vllm={sys.executable}", "--set", f"plugins={json.dumps(roles)}", "--prefix-caching"]
    runs = ["--workloads", "single", "--repeat", "2", "--json", str(out)]
    ran = subprocess.run([*command, *options, *runs], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert (report["repeat"], report["prefix_caching"], list(report["engines"])) == (2, True, ["trivet", "vllm"])
    assert [len(report["runs"]["single"][name]) for name in ("trivet", "vllm")] == [2, 2]
    turns = [line.split()[2] for line in ran.stderr.splitlines() if line.startswith(("1/2", "2/2"))]
    assert turns == ["trivet", "vllm", "trivet", "vllm"]
    assert "| single | output |" in ran.stdout
    told = log.read_text(encoding="utf-8").splitlines()
    assert [line.split("]")[0] for line in told[1:]] == ["[64"] * 3  # the warm-up, and two repetitions
    assert json.loads(told[0])["enable_prefix_caching"] is True


def test_ratios_are_of_medians_with_the_range_of_single_ones(peers: ModuleType) -> None:
    rates = {"single": {"a": [10.0, 12.0, 30.0], "b": [5.0, 8.0, 6.0]}, "long": {"a": [4.0] * 3, "b": [8.0] * 3}}
    summary = peers.summarise(rates)
    assert summary["single"]["tokens_per_s"] == {"a": 12, "b": 6}
    assert summary["single"]["ratios"] == {"b": {"ratio": 2, "lowest": 1.5, "highest": 5}}
    assert (summary["single"]["counts"], summary["long"]["counts"]) == ("output", "prompt + output")
    engine = {"startup_s": 1.25, "load_s": 1.0, "peak_bytes": 3 << 20}
    report = {"engines": {"a": engine, "b": engine}, "workloads": summary, "bound": {"single": 24.0, "long": 5.0}}
    lines = list(peers.tables(report))
    assert lines[0] == "| tokens/s | counts | a | b | a / b | bound | a / bound |"
    assert lines[2] == "| single | output | 12.0 | 6.0 | **2.00** (1.50 to 5.00) | 24.0 | 0.50 |"
    assert lines[-1] == "| b | 1.2 | 1.0 | 3 |"


def test_the_bound_of_the_matrix_products_is_asked_of_the_program_that_measures_it(
    peers: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"vocab_size": 64}), encoding="utf-8")
    found = peers.measure_bound(str(tmp_path), "bfloat16", ["single"])
    assert list(found) == ["single"]
    assert found["single"] > 0
    captured = capfd.readouterr()
    assert captured.out == ""  # the tables of this script stay alone
    with pytest.raises(SystemExit, match=r"--bound: kernels\.py ended with code 1"):
        peers.measure_bound(str(tmp_path / "nothing"), "bfloat16", ["single"])


def test_trivet_runs_once_for_each_quantization(peers: ModuleType) -> None:
    found = list(peers.variants(["trivet", "vllm"], ["none", "int8"]))
    assert found == [
        ("trivet", "trivet", {}),
        ("trivet-int8", "trivet", {"quantization": "int8"}),
        ("vllm", "vllm", {}),
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--engines", "trivet,sglang"], "'sglang' is none of"),
        (["--engines", "llama"], "llama is not installed here; give --python llama=PATH"),
        (["--python", "sglang=/x"], "'sglang=/x' must look like ENGINE=PATH"),
        (["--model", "vllm"], "'vllm' must look like"),
        (["--workloads", "mixed,chat"], "chat is none of"),
        (["--repeat", "0"], "--repeat: must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(
    peers: ModuleType, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        peers.main(["model", *arguments])
    assert named in f"{caught.value} {capsys.readouterr().err}"
