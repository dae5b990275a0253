"""``trivet bench startup``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_kit import Run, Site

#: what vLLM's benchmark writes
VLLM_KEYS = {
    f"{key}"
    for temperature in ("cold", "warm")
    for figure in ("startup", "compilation")
    for key in (
        f"avg_{temperature}_{figure}_time",
        f"{temperature}_{figure}_times",
        f"{temperature}_{figure}_percentiles",
    )
}
PHASES = ("interpreter", "imports", "plugins", "load", "allocate")


@pytest.fixture(autouse=True)
def visible(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes, for processes that the command starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.packages), *sys.path]))


def measured(run: Run, path: Path, *arguments: Any) -> dict[str, Any]:
    result = run("bench", "startup", *arguments, "--model", "none", "--output-json", path)
    assert result.code == 0, result.err
    return json.loads(path.read_text(encoding="utf-8"))


def test_starts_are_measured_in_processes_of_their_own(run: Run, site: Site, tmp_path: Path) -> None:
    site.plugin(
        "teller",
        f"""
        import logging
        import os
        from pathlib import Path

        @hookimpl
        def trivet_engine_started(context):
            for seconds in (0.25, 0.5):
                logging.getLogger("trivet.kernels").info("compiled", extra={{"compile_seconds": seconds}})
            with Path({str(tmp_path / "pids")!r}).open("a") as file:
                print(os.getpid(), os.environ.get("TRITON_CACHE_DIR"), file=file)
            print("a plugin that prints")
        """,
    )
    config = site.config(plugins={"extension": [{"use": "teller"}]})
    counts = ("--num-iters-cold", 1, "--num-iters-warmup", 1, "--num-iters-warm", 2)
    found = measured(run, tmp_path / "out.json", config, *counts)
    starts = [line.split() for line in (tmp_path / "pids").read_text(encoding="utf-8").splitlines()]
    assert len({pid for pid, _ in starts} - {str(os.getpid())}) == 4
    usual = str(os.environ.get("TRITON_CACHE_DIR"))
    assert [folder == usual for _, folder in starts] == [False, True, True, True]
    assert set(found) >= VLLM_KEYS
    assert (len(found["cold_startup_times"]), len(found["warm_startup_times"])) == (1, 2)
    for temperature in ("cold", "warm"):
        phases = sum(found[f"avg_{temperature}_{phase}_time"] for phase in PHASES)
        assert found[f"avg_{temperature}_startup_time"] == pytest.approx(phases)
        assert all(found[f"avg_{temperature}_{phase}_time"] >= 0 for phase in PHASES)
        assert found[f"avg_{temperature}_first_token_time"] > 0
        assert set(found[f"{temperature}_compilation_times"]) == {0.75}
        assert list(found[f"{temperature}_load_percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_a_table_has_the_phases_and_leaves_out_what_was_not_measured(run: Run, site: Site) -> None:
    counts = ("--num-iters-cold", 0, "--num-iters-warmup", 0, "--num-iters-warm", 1)
    result = run("bench", "startup", site.config(), *counts, "--model", "none")
    assert result.code == 0, result.err
    titles = [line.strip() for line in result.out.splitlines()]
    assert "cold" not in result.out
    for name in ("startup", *PHASES, "first token"):
        assert any(title.startswith(name) for title in titles)


def test_what_the_engine_refuses_is_said_as_the_other_commands_say_it(run: Run, site: Site) -> None:
    config = site.config(plugins={"cache": {"use": "paged", "num_blocks": 2}})
    result = run("bench", "startup", config, "--model", "none", "--max-model-len", 500)
    direct = run("bench", "latency", config, "--model", "none", "--max-model-len", 500)
    assert (result.code, direct.code) == (2, 2)
    assert result.err == direct.err
    assert "Traceback" not in result.err


def test_a_process_that_dies_is_reported_with_its_last_words(run: Run, site: Site) -> None:
    site.plugin(
        "deadly",
        """
        @hookimpl
        def trivet_engine_started(context):
            raise SystemExit("the end is nigh")
        """,
    )
    result = run("bench", "startup", site.config(plugins={"extension": [{"use": "deadly"}]}), "--model", "none")
    assert result.code == 1
    assert "ended with code 1" in result.err
    assert "the end is nigh" in result.err
    assert "Traceback" not in result.err


def test_nothing_to_measure_is_refused(run: Run, site: Site) -> None:
    result = run("bench", "startup", site.config(), "--num-iters-cold", 0, "--num-iters-warm", 0)
    assert result.code == 2
    assert "--num-iters-cold" in result.err
