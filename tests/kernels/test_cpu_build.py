"""Compiling the native kernels: what is kept, what happens without a compiler, and that processes do not collide."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trivet_kernels.cpu import build, levels
from trivet_kernels.cpu.levels import LEVELS, Level, cpu_flags, usable_levels

GENERIC = LEVELS[-1]
REAL = build.compiler()
needs_compiler = pytest.mark.skipif(REAL is None, reason="there is no C compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sources that compile in no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.c").write_text("int one(void) { return 1; }\n")
    (folder / "two.c").write_text('#include "number.h"\nint two(void) { return NUMBER; }\n')
    (folder / "number.h").write_text("#define NUMBER 2\n")
    monkeypatch.setattr(build, "_SOURCES", folder)
    build._digest.cache_clear()
    yield folder
    build._digest.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process has not asked for the library yet."""
    build._build_and_load.cache_clear()
    yield
    build._build_and_load.cache_clear()


def make_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A ``gcc`` that is first on the PATH; it notes every call in a file, which is returned."""
    log = folder / "calls"
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    gcc = bin_folder / "gcc"
    gcc.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{script}\n')
    gcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_folder), prepend=":")
    build._digest.cache_clear()
    return log


def compiled(log: Path) -> list[str]:
    return [call for call in log.read_text().splitlines() if " -c " in call]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def compile_seconds(caplog: pytest.LogCaptureFixture) -> list[float]:
    return [vars(record)["compile_seconds"] for record in caplog.records if hasattr(record, "compile_seconds")]


@needs_compiler
def test_all_sources_are_in_the_library(sources: Path, tmp_path: Path) -> None:
    path = build.build([GENERIC], tmp_path / "cache")
    found = build.load(path)
    assert (found.one(), found.two()) == (1, 2)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@needs_compiler
def test_what_was_compiled_is_used_again(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_compiler(tmp_path, monkeypatch, f'exec {REAL} "$@"')
    first = build.build([GENERIC], tmp_path / "cache")
    assert len(compiled(log)) == 2
    assert build.build([GENERIC], tmp_path / "cache") == first
    assert len(compiled(log)) == 2


@needs_compiler
@pytest.mark.parametrize("name", ["two.c", "number.h"])
def test_a_changed_source_is_compiled_anew(sources: Path, tmp_path: Path, name: str) -> None:
    before = build.build([GENERIC], tmp_path / "cache")
    file = sources / name
    file.write_text(file.read_text().replace("NUMBER;", "3;").replace("NUMBER 2", "NUMBER 3"))
    build._digest.cache_clear()
    after = build.build([GENERIC], tmp_path / "cache")
    assert after != before
    assert build.load(after).two() == 3


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "cut short", "changed"])
def test_a_damaged_library_is_compiled_anew(sources: Path, tmp_path: Path, damage: str) -> None:
    path = build.build([GENERIC], tmp_path / "cache")
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "empty": b"",
        "cut short": content[:middle],
        "changed": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
    }
    path.write_bytes(damaged[damage])
    assert build.build([GENERIC], tmp_path / "cache") == path
    assert build.load(path).two() == 2


@needs_compiler
def test_a_level_that_the_compiler_does_not_know_is_passed_over(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_compiler(tmp_path, monkeypatch, f'case "$*" in *-mnew*) echo "no -mnew here"; exit 1;; esac\nexec {REAL} "$@"')
    tried = [Level("newest", ("-mnew",), frozenset()), GENERIC]
    path = build.build(tried, tmp_path / "cache")
    assert path.name.startswith("generic-")
    assert build.load(path).one() == 1
    (said,) = warnings_of(caplog)
    assert said == "native CPU kernels are those for generic, although this processor has newest: no -mnew here"
    caplog.clear()
    assert build.build(tried, tmp_path / "cache") == path
    assert warnings_of(caplog) == [said], "every process that has to do with less says so"
    caplog.clear()
    with pytest.raises(build.BuildError, match="no -mnew here"):
        build.build(tried[:1], tmp_path / "cache")
    assert warnings_of(caplog) == []


@needs_compiler
def test_a_level_whose_library_does_not_load_is_passed_over(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sources / "three.c").write_text(
        "#ifdef RICH\nint nowhere(void);\nint three(void) { return nowhere(); }\n"
        "#else\nint three(void) { return 3; }\n#endif\n"
    )
    rich = Level("rich", ("-DRICH",), frozenset())
    path = build.build([rich, GENERIC], tmp_path / "cache")
    assert path.name.startswith("generic-")
    assert build.load(path).three() == 3
    assert list(path.parent.iterdir()) == [path], "what does not load is not kept"
    (said,) = warnings_of(caplog)
    assert "for generic, although this processor has rich" in said
    assert "nowhere" in said
    with pytest.raises(build.BuildError, match="nowhere"):
        build.build([rich], tmp_path / "cache")


@needs_compiler
def test_the_seconds_of_compiling_are_told_where_something_was_compiled(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(tmp_path, monkeypatch, f'case "$*" in *-c*) sleep 0.2;; esac\nexec {REAL} "$@"')
    with caplog.at_level(logging.INFO, logger="trivet.kernels"):
        build.build([GENERIC], tmp_path / "cache")
        (seconds,) = compile_seconds(caplog)
        assert seconds >= 0.2
        caplog.clear()
        build.build([GENERIC], tmp_path / "cache")
    assert compile_seconds(caplog) == []


@needs_compiler
def test_processes_that_compile_at_once_do_not_disturb_each_other(sources: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from trivet_kernels.cpu import build; from trivet_kernels.cpu.levels import LEVELS\n"
        "build._SOURCES = Path(sys.argv[1])\n"
        "print(build.build(LEVELS[-1:], Path(sys.argv[2])))\n"
    )
    command = [sys.executable, "-c", code, str(sources), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 4
    (path,) = paths
    assert build.load(Path(path)).two() == 2
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [Path(path).name]


def test_without_a_compiler_there_is_no_library_and_one_warning(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="trivet.kernels"):
        assert build.library() is None
        assert build.library() is None
        assert "no C compiler" in (build.problem() or "")
    (record,) = caplog.records
    assert "install gcc" in record.getMessage()


def test_a_compiler_that_fails_says_why(
    fresh: None, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_compiler(tmp_path, monkeypatch, 'echo "cannot find stdint.h"; exit 1')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with caplog.at_level(logging.WARNING, logger="trivet.kernels"):
        assert build.library() is None
    assert "cannot find stdint.h" in caplog.text
    assert not list(build.cache_folder().iterdir())


def test_a_compiler_may_complain_in_any_encoding(
    fresh: None, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler(tmp_path, monkeypatch, "printf 'erreur irr\\351cup\\351rable'; exit 1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert "cup" in (build.problem() or "")


@needs_compiler
def test_whoever_waits_for_the_compiler_is_told_once(
    fresh: None, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = make_compiler(tmp_path, monkeypatch, f'exec {REAL} "$@"')
    monkeypatch.setattr(build, "usable_levels", lambda: [GENERIC])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with caplog.at_level(logging.INFO, logger="trivet.kernels"):
        assert build.library() is not None
        first, last = caplog.records
        assert {first.levelno, last.levelno} == {logging.INFO}
        assert "compiling the native CPU kernels" in first.getMessage()
        assert f"once: they are kept in {tmp_path / 'home' / 'trivet' / 'kernels'}" in first.getMessage()
        assert last.getMessage().startswith("compiled the native CPU kernels for generic in ")
        assert len(compiled(log)) == 2
        caplog.clear()
        build._build_and_load.cache_clear()
        assert build.library() is not None
        assert caplog.records == []


@needs_compiler
def test_two_levels_are_one_wait(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_compiler(tmp_path, monkeypatch, f'case "$*" in *-mno-such*) exit 1;; esac\nexec {REAL} "$@"')
    with caplog.at_level(logging.INFO, logger="trivet.kernels"):
        build.build([Level("odd", ("-mno-such",), frozenset()), GENERIC], tmp_path / "cache")
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" kernels")[0] for text in said] == [
        "compiling the native CPU",
        "compiled the native CPU",
        "native CPU",
    ]


@pytest.mark.parametrize("given", ["relative/folder", ".", ""])
def test_a_relative_cache_home_is_ignored(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "trivet" / "kernels"


@needs_compiler
def test_a_user_without_a_home_gets_a_library(fresh: None, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    found = build.library()
    assert found is not None
    assert found.two() == 2


@needs_compiler
def test_a_linker_that_fails_says_why(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_compiler(
        tmp_path, monkeypatch, f'case "$*" in *-shared*) echo "disk full" >&2; exit 1;; esac\nexec {REAL} "$@"'
    )
    with pytest.raises(build.BuildError, match="disk full"):
        build.build([GENERIC], tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@needs_compiler
def test_compilers_are_not_left_running(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_compiler(tmp_path, monkeypatch, 'case "$*" in *-c*) exec sleep 60;; esac')
    monkeypatch.setattr(build, "_TIMEOUT", 0.2)
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def start(*args: object, **options: object) -> subprocess.Popen[str]:
        process = popen(*args, **options)
        started.append(process)
        return process

    monkeypatch.setattr(build.subprocess, "Popen", start)
    with pytest.raises(subprocess.TimeoutExpired):
        build.build([GENERIC], tmp_path / "cache")
    assert started
    assert all(process.returncode is not None for process in started)


@needs_compiler
def test_a_cache_folder_that_cannot_be_written_costs_a_compilation(
    fresh: None, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="trivet.kernels"):
        found = build.library()
    assert isinstance(found, ctypes.CDLL)
    assert found.two() == 2
    assert "compiled anew at every start" in caplog.text


@needs_compiler
def test_a_file_that_is_no_library_is_a_build_error(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("nothing")
    with pytest.raises(build.BuildError, match=r"broken\.so cannot be loaded"):
        build.load(tmp_path / "broken.so")


@needs_compiler
def test_parallel_loops_use_torchs_threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = build.load(build.build(usable_levels(), tmp_path_factory.getbasetemp().parent / "kernels"))
    found.trivet_count_threads.argtypes = (ctypes.c_int64,)
    assert found.trivet_count_threads(3) == 3
    found.trivet_max_threads.restype = ctypes.c_int64
    before = torch.get_num_threads()
    try:
        for threads in (3, 1, 2):
            torch.set_num_threads(threads)
            assert found.trivet_max_threads() == threads, "another runtime would not have heard of it"
    finally:
        torch.set_num_threads(before)


def test_levels_are_those_of_the_processor(tmp_path: Path) -> None:
    assert usable_levels()[-1] is GENERIC
    flags = cpu_flags()
    assert all(level.needs <= flags for level in usable_levels())
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "nothing") == frozenset()


@pytest.mark.parametrize("hidden", ["abm", "popcnt", "bmi2", "movbe"])
def test_a_machine_that_hides_an_instruction_gets_no_level_that_may_use_it(
    hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "cpu_flags", lambda: frozenset().union(*(level.needs for level in LEVELS)) - {hidden})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    levels.usable_levels.cache_clear()
    try:
        assert levels.usable_levels() == (GENERIC,)
    finally:
        levels.usable_levels.cache_clear()
