"""Everything that the content of a block depends on besides its key: content on disk is used only where all of it is
the same."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet._version import __version__
from trivet.errors import ModelLoadError
from trivet.model_source import resolve_model
from trivet_offload.segments import FORMAT

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


def folder(path: str, fingerprint: bytes) -> Path:
    """Where the content of all ranks is."""
    return Path(path).expanduser().absolute() / fingerprint.hex()[:32]


def describe(where: Path, found: dict[str, Any]) -> None:
    """Leave a note in the folder of what is in it, for people who wonder which they may delete."""
    text = json.dumps(found, indent=1, sort_keys=True, default=str)
    try:
        (where / "about.json").write_text(text, encoding="utf-8")
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
