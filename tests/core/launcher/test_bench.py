"""``trivet bench``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_kit import Run

SMALL = ("--workload", "alpaca", "--kv-tokens", 900, "--max-model-len", 256, "--num-requests", 60)
STATES = ("token_states", "reservation", "internal_fragmentation", "external_fragmentation")


def memory(run: Run, path: Path, *arguments: Any) -> dict[str, Any]:
    result = run("bench", "memory", *SMALL, "--json", path, *arguments)
    assert result.code == 0, result.err
    return json.loads(path.read_text(encoding="utf-8"))


def test_memory_compares_the_caches_in_a_table_and_as_json(run: Run, tmp_path: Path) -> None:
    result = run("bench", "memory", *SMALL, "--json", tmp_path / "out.json")
    assert result.code == 0, result.err
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    setting = ("benchmark", "workload", "num_requests", "kv_tokens", "max_model_len", "block_size", "seed")
    assert [report[key] for key in setting] == ["memory", "alpaca", 60, 900, 256, 16, 0]
    assert report["mean_prompt_tokens"] == pytest.approx(19.31, rel=0.1)
    assert report["mean_output_tokens"] == pytest.approx(58.45, rel=0.1)
    names = ["contiguous-max", "contiguous-pow2", "contiguous-oracle", "paged"]
    assert [entry["cache"] for entry in report["caches"]] == names
    for entry in report["caches"]:
        assert sum(entry[state] for state in STATES) == pytest.approx(1)
        assert entry["paper_token_states"] is None  # another setting than the paper's
        (row,) = (line.split() for line in result.out.splitlines() if line.split()[:1] == [entry["cache"]])
        assert row[1:-1] == [f"{100 * entry[state]:.1f}" for state in STATES]
        assert row[-1] == f"{entry['mean_running']:.1f}"


def test_memory_measures_the_caches_that_are_named(run: Run, tmp_path: Path) -> None:
    report = memory(run, tmp_path / "out.json", "--caches", "paged, contiguous-oracle", "--block-size", 4, "--seed", 5)
    assert [entry["cache"] for entry in report["caches"]] == ["paged", "contiguous-oracle"]
    assert (report["block_size"], report["seed"]) == (4, 5)


def test_the_papers_figures_stand_beside_its_own_setting(run: Run) -> None:
    result = run("bench", "memory", "--caches", "paged")
    assert result.code == 0, result.err
    (row,) = (line.split() for line in result.out.splitlines() if line.split()[:1] == ["paged"])
    assert row[2] == "96.3"
    assert float(row[1]) >= 96


def test_memory_draws_a_plot(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    result = run("bench", "memory", *SMALL, "--caches", "contiguous-max,paged", "--plot", path)
    assert result.code == 0, result.err
    assert str(path) in result.err
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    wrong = run("bench", "memory", *SMALL, "--plot", tmp_path / "memory.docx")
    assert wrong.code == 2
    assert "png" in wrong.err


def test_a_plot_without_its_extra_names_it_and_nothing_else_needs_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("bench", "memory", *SMALL, "--plot", tmp_path / "memory.png")
    assert result.code == 2
    assert "trivet[bench]" in result.err
    assert result.out == ""  # it is known before anything is measured
    assert not list(tmp_path.iterdir())
    assert run("bench", "memory", *SMALL, "--caches", "paged").code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--caches", "paged,paging"), "'paging'"),
        (("--caches", ","), "nothing"),
        (("--workload", "gsm8k"), "gsm8k"),
        (("--json", "no/such/folder/out.json"), "no/such/folder"),
        (("--plot", "no/such/folder/out.png"), "no/such/folder"),
        (("--kv-tokens", 200), "200 tokens of KV memory"),
        (("--num-requests", 2), "2 requests are too few"),
        (("--max-model-len", 1), "--max-model-len"),
    ],
)
def test_wrong_input_of_memory_is_named(run: Run, arguments: tuple[Any, ...], named: str) -> None:
    result = run("bench", "memory", *SMALL, *arguments)
    assert result.code == 2
    assert named in result.err.replace("\n", " ").replace("│ ", "")
    assert "Traceback" not in result.err
