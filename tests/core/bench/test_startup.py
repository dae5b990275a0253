"""What measures starts: the clock of imports, caches that are hidden, and what of a file is in memory."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import time
from pathlib import Path

import pytest

from trivet.bench._startup_child import overlap, timed_imports
from trivet.bench.startup import (
    PHASES,
    Start,
    drop_from_page_cache,
    empty_kernel_caches,
    model_files,
    page_cache_share,
    startup_report,
)
from trivet_schemas.config import EngineConfig


def test_imports_are_timed_once_however_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_outer.py").write_text("import time, slow_inner\ntime.sleep(0.02)\n", encoding="utf-8")
    (tmp_path / "slow_inner.py").write_text("import time\ntime.sleep(0.03)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = builtins.__import__, importlib.import_module
    start = time.perf_counter()
    with timed_imports() as intervals:
        importlib.import_module("slow_outer")
        time.sleep(0.05)
    whole = (start, time.perf_counter())
    assert (builtins.__import__, importlib.import_module) == before
    for name in ("slow_outer", "slow_inner"):
        del sys.modules[name]
    assert 0.05 <= overlap(whole, intervals) <= whole[1] - whole[0] - 0.05
    assert overlap((whole[1], whole[1] + 1), intervals) == 0


def test_a_failed_import_is_timed_and_raised() -> None:
    with timed_imports() as intervals, pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_module_of_this_name")
    assert len(intervals) == 1


def test_a_cold_start_finds_everything_that_is_cached_but_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    for folder in ("trivet/kernels/abc", "trivet/demo", "huggingface/hub"):
        (real / folder).mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(real))
    variables = empty_kernel_caches(tmp_path / "cold")
    cold = Path(variables["XDG_CACHE_HOME"])
    assert (cold / "huggingface" / "hub").is_dir()
    assert (cold / "trivet" / "demo").is_dir()
    assert not (cold / "trivet" / "kernels").exists()
    (cold / "trivet" / "kernels").mkdir()  # what the start compiles stays apart
    assert [path.name for path in (real / "trivet" / "kernels").iterdir()] == ["abc"]
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert not Path(variables[name]).exists()


def test_a_cold_start_ignores_a_relative_cache_home_as_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "relative" / "wrong").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "right").mkdir(parents=True)
    empty_kernel_caches(tmp_path / "cold")
    assert {path.name for path in (tmp_path / "cold").iterdir()} == {"right", "trivet"}


def test_a_model_in_a_folder_has_its_files_and_an_unknown_one_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "empty.txt").touch()
    names = [path.name for path in model_files(EngineConfig(model=str(tmp_path)))]
    assert names == ["config.json", "model.safetensors"]
    assert model_files(EngineConfig(model=str(tmp_path / "nothing" / "here.gguf"))) == []


def test_what_is_in_memory_of_a_file_is_told_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    path.read_bytes()
    before = page_cache_share([path])
    if before is None:
        pytest.skip("this system does not tell what is in its page cache")
    assert before == 1
    drop_from_page_cache([path])
    after = page_cache_share([path])
    assert after is not None
    assert after <= before
    assert page_cache_share([]) is None


def test_a_report_has_the_keys_of_vllm_for_every_figure() -> None:
    phases = dict(zip(PHASES, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True))
    starts = [Start(1.5, 0.1, phases, 0.25, 0.75), Start(2.5, 0.3, phases, None)]
    report = startup_report({"cold": starts, "warm": []})
    names = ["startup", "compilation", *PHASES, "first_token"]
    assert set(report) == {
        "cold_page_cache_shares",
        *(f"avg_cold_{name}_time" for name in names),
        *(f"cold_{name}_times" for name in names),
        *(f"cold_{name}_percentiles" for name in names),
    }
    assert report["avg_cold_startup_time"] == 2
    assert report["cold_startup_times"] == [1.5, 2.5]
    assert report["cold_compilation_times"] == [0.75, 0]
    assert list(report["cold_first_token_percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert report["cold_first_token_percentiles"]["50"] == pytest.approx(0.2)
    assert report["cold_page_cache_shares"] == [0.25, None]
