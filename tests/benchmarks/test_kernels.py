"""The script that measures kernels runs, prints what it says, and simulates the steps that an engine takes."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trivet_kernels.cpu.build import library

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Run = Callable[..., str]


@pytest.fixture
def bound_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_bound")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The script, called with options; returns what it prints."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # By its path: a folder called kernels may be importable, where the working directory is.
    spec = importlib.util.spec_from_file_location("_kernels_script", BENCHMARKS / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    script, threads = importlib.util.module_from_spec(spec), torch.get_num_threads()
    spec.loader.exec_module(script)

    def call(*options: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["kernels.py", *map(str, options)])
        script.main()
        return capsys.readouterr().out

    yield call
    torch.set_num_threads(threads)


def test_kernels_of_all_providers_and_their_share_of_what_there_is(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    printed = run("--quick", "--threads", "1", "--only", "ops,argmax,cache,attention,linear", "--json", out)
    figures: dict[str, Any] = json.loads(out.read_text())
    assert figures["threads"] == 1
    assert figures["bandwidth_gb_per_s"] > 0
    assert set(figures["gflop_per_s"]) == {"float32", "bfloat16", "int8"}
    providers: dict[str, set[str]] = {}
    for line in figures["kernels"]:
        providers.setdefault(line["kernel"], set()).add(line["provider"])
        assert line["us"] > 0
        assert line["share"] >= 0
        assert line["kernel"] in printed
    native = {"native"} if library() is not None else set()
    assert providers["rms_norm"] == providers["rotary"] == {"reference"} | native
    assert providers["decode attention"] == {"torch", "sdpa"} | ({"cpu"} if native else set())
    assert providers["cache write"] == {"torch"}
    assert providers["argmax"] == {"chosen", "reference"}
    assert providers["linear"] >= {"plain"} | native
    line = next(line for line in figures["kernels"] if line["kernel"] == "linear")
    flops = 2 * 896 * 9728 * 1  # of the first shape, 0.5B's gate_up with one row
    assert line["gflop_per_s"] == pytest.approx(flops / line["us"] / 1e3, rel=0.01)


def test_an_unknown_kernel_is_named_with_those_there_are(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--only", "ops,norms")
    assert "norms unknown; there are ops, argmax" in capsys.readouterr().err


def test_what_the_products_alone_would_allow(run: Run, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    out = tmp_path / "figures.json"
    printed = run("bound", tmp_path, "--workload", "single,decode", "--quick", "--threads", "1", "--json", out)
    found = json.loads(out.read_text())["bound"]
    assert found["single"]["steps"] == 64
    assert found["decode"]["steps"] == 96
    for name, produced, prompts in (("single", 64, 64), ("decode", 64 * 96, 64 * 16)):
        assert name in printed
        seconds = found[name]["body_s"] + found[name]["head_s"]
        assert found[name]["output_tokens_per_s"] == pytest.approx(produced / seconds, rel=0.05)
        ratio = found[name]["total_tokens_per_s"] / found[name]["output_tokens_per_s"]
        assert ratio == pytest.approx(1 + prompts / produced, rel=1e-3)


def test_a_folder_without_a_model_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"config\.json does not exist"):
        run("bound", tmp_path)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(SystemExit, match="has no 'hidden_size'"):
        run("bound", tmp_path)


def test_steps_decode_first_and_fill_up_with_prompts(bound_module: ModuleType) -> None:
    work = [([1] * 5, 3), ([1] * 9, 2), ([1] * 2, 1)]
    steps = bound_module.steps_of(work, token_budget=8, max_num_seqs=2)
    # 5 + 3 of the second; 1 + 6 of the second, while a third must wait for a place; both decode, and end; the third.
    assert [(step.tokens, step.draws) for step in steps] == [(8, 1), (7, 2), (2, 2), (2, 1)]


def test_every_token_but_the_last_of_a_request_is_computed_once(bound_module: ModuleType) -> None:
    work = [([1] * length, count) for length, count in ((30, 4), (1, 9), (17, 1), (64, 2), (3, 5))]
    for token_budget, max_num_seqs in ((1, 1), (7, 2), (16, 3), (2048, 64)):
        steps = bound_module.steps_of(work, token_budget=token_budget, max_num_seqs=max_num_seqs)
        assert sum(step.tokens for step in steps) == sum(len(prompt) + count - 1 for prompt, count in work)
        assert sum(step.draws for step in steps) == sum(count for _, count in work)
        assert all(0 < step.tokens <= token_budget and step.draws <= max_num_seqs for step in steps)
