"""Layers by their names: patterns in options, and what a model's files hold, before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trivet.errors import TrivetError
from trivet.model_source import find_model

if TYPE_CHECKING:
    from trivet_schemas.config import EngineConfig

logger = logging.getLogger("trivet.model")

_HEAD = "lm_head"
_EMBEDDING = "model.embed_tokens"
_MAX_SHOWN = 10


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a layer's name fits one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_head(name: str) -> bool:
    """Whether the layer is the output projection."""
    return name.rpartition(".")[2] == _HEAD


def matrices(config: EngineConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name → shape and how it is stored, of every matrix in the files of the configured model, by their headers.

    A tied head stands for the embeddings, which are no layer. Empty for a hub model that is not on this machine, and
    for files that cannot be read: then whoever loads the model says what is wrong with them, or reads them otherwise.
    """
    from trivet_torch.weights.stored import open_weights

    try:
        found = find_model(config.model, config.revision)
        if found is None:
            return {}
        weights = open_weights(found.path, trust_remote_code=config.trust_remote_code)
    except TrivetError:
        return {}
    try:
        kept = {name.removesuffix(".weight"): (weights.shape(name), weights.stored(name)) for name in weights.names}
    finally:
        weights.close()
    layers = {name: matrix for name, matrix in kept.items() if len(matrix[0]) == 2}
    embedding = layers.pop(_EMBEDDING, None)
    if embedding is not None:
        layers.setdefault(_HEAD, embedding)
    return layers


def warn_of_patterns(field: str, patterns: Sequence[str], names: Sequence[str], model: str) -> None:
    """Log a warning that names the patterns, given as ``plugins.quantization.field``, which fit none of ``names``."""
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        logger.warning(
            "plugins.quantization.%s: no layer of %s fits %s; patterns are for whole names, and layers are called %s",
            field,
            model,
            " or ".join(map(repr, idle)),
            _examples(names),
        )


def _examples(names: Sequence[str]) -> str:
    """The first layer of each kind, by the last part of its name."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.rpartition(".")[2], name)
    shown = list(first.values())
    return ", ".join(shown[:_MAX_SHOWN]) + (", ..." if len(shown) > _MAX_SHOWN else "")
