"""Whether the native model serves what a configuration names, told from headers: nothing is loaded, and of a hub model
that is not on this machine nothing but its ``config.json`` is fetched."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trivet.errors import TrivetError
from trivet.model_source import find_model, hub_config
from trivet.provider import Suitability
from trivet_native.fields import GGUF_ARCHITECTURES, problem

if TYPE_CHECKING:
    from pathlib import Path

    from trivet_schemas.config import EngineConfig

#: above the transformers model's
RANK = 20


def suits(config: EngineConfig) -> Suitability:
    """The answer to ``use: auto``; any doubt is a no."""
    try:
        reason = _problem(config)
    except (TrivetError, OSError, ValueError) as exc:  # told by the provider that is chosen then
        reason = f"its configuration cannot be read: {exc}"
    if reason is None:
        return Suitability(RANK, "serves this family with fused and packed weights")
    return Suitability(None, reason)


def _problem(config: EngineConfig) -> str | None:
    found = find_model(config.model, config.revision)
    if found is None:
        given = hub_config(config.model, config.revision)
        if given is None:
            return (
                f"its architecture is not known before {config.model!r} is downloaded, and the hub did not give its "
                "config.json alone; once it is there, native is considered, or set plugins.model to native"
            )
    elif found.kind == "gguf":
        return _gguf_problem(found.path)
    else:
        given = json.loads((found.path / "config.json").read_text(encoding="utf-8"))
    if not isinstance(given, dict):
        return "its config.json holds no object"
    if config.trust_remote_code and given.get("auto_map"):
        return "it brings code of its own (auto_map), which trust_remote_code lets run"
    return problem(given)


def _gguf_problem(path: Path) -> str | None:
    from trivet.gguf import GGUFFile

    architecture = GGUFFile(path).metadata.get("general.architecture")
    if architecture in GGUF_ARCHITECTURES:
        return None
    return f"its architecture {architecture!r} is not one of {', '.join(sorted(GGUF_ARCHITECTURES))}"
