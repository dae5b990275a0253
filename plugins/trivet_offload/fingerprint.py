"""Everything that the content of a block depends on besides its key: content on disk is used only where all of it is
the same."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet._version import __version__
from trivet.errors import ModelLoadError, TrivetError
from trivet.model_source import resolve_model
from trivet_offload.segments import FORMAT, unusable

if TYPE_CHECKING:
    from trivet.context import Context
    from trivet.roles import KVLayout
    from trivet_offload.options import OffloadOptions

_logger = logging.getLogger(__name__)

#: providers that compute keys and values, or decide who computes which of them
_ROLES = ("model", "attention", "quantization", "drafter", "executor")


def facts(context: Context, layout: KVLayout, device: str, options: OffloadOptions) -> dict[str, Any]:
    """By name; plain data. The engine and its workers come to the same."""
    config = context.config
    return {
        "format": FORMAT,
        "trivet": __version__,
        "namespace": options.namespace,
        "model": _model(config.model, config.revision),
        "dtype": config.dtype,
        "device": device.partition(":")[0],
        "providers": {role: context.selected(role) for role in _ROLES},
        "layers": [asdict(spec) for spec in layout.specs],
        "groups": [asdict(group) for group in layout.groups],
        "layout": layout.layout,
    }


def digest(found: dict[str, Any]) -> bytes:
    """32 bytes that stand for what :func:`facts` found."""
    return sha256(json.dumps(found, sort_keys=True, default=str).encode()).digest()


def root(path: str) -> Path:
    """The folder that the options name. Raises TrivetError for what is no name of a folder."""
    if not path.strip() or "\0" in path:
        raise TrivetError(unusable(path, "that is no name of a folder"))
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as exc:
        raise TrivetError(unusable(path, exc)) from exc


def check_root(path: str) -> None:
    """Raise TrivetError if the folder that the options name is none, or cannot be made or written to."""
    where = root(path)
    try:
        while not os.path.lexists(where):
            where = where.parent
        is_folder = stat.S_ISDIR(where.stat().st_mode)
    except OSError as exc:
        raise TrivetError(unusable(path, exc)) from exc
    if not is_folder:
        raise TrivetError(unusable(path, f"{where} is no folder"))
    if not os.access(where, os.W_OK | os.X_OK):
        raise TrivetError(unusable(path, f"{where} cannot be written to"))


def folder(path: str, fingerprint: bytes) -> Path:
    """Where the content of all ranks is."""
    return root(path) / fingerprint.hex()[:32]


def describe(where: Path, found: dict[str, Any]) -> None:
    """Leave a note in the folder of what is in it, for people who wonder which they may delete."""
    text = json.dumps(found, indent=1, sort_keys=True, default=str)
    try:
        fresh = where / "about.new"
        fresh.unlink(missing_ok=True)
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(where / "about.json")
    except OSError as exc:
        _logger.warning("%s cannot be written: %s", where / "about.json", exc)


def rank_folder(where: Path, rank: int) -> Path:
    """Where one rank's content is."""
    return where / f"rank{rank}"


def _model(name: str, revision: str | None) -> dict[str, Any]:
    """A model by its files: a folder whose files were replaced is another model."""
    try:
        location = resolve_model(name if revision is None or Path(name).exists() else f"{name}@{revision}")
    except ModelLoadError:
        # The provider knows models that have no files.
        return {"name": name, "revision": revision}
    paths = [location.path] if location.path.is_file() else sorted(p for p in location.path.iterdir() if p.is_file())
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return {"path": str(location.path), "revision": location.revision, "files": files}
