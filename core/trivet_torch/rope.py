"""Rotary embeddings whose frequencies depend on a sequence's length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trivet.errors import ModelLoadError


def check_rope(location: str, config: Any, max_model_len: int) -> None:
    """Refuse a context in which the frequencies would change while a request grows.

    transformers computes the frequencies of ``dynamic`` and ``longrope`` from the longest sequence of the batch, and
    cached keys keep the frequencies of their time. Results would depend on batch mates and chunk sizes. Up to the
    length that the model was first trained for, the frequencies are constant and everything agrees.

    Args:
        location: What the user named, for messages.
        config: The decoder's configuration.
        max_model_len: The context length that the engine will run with.

    Raises:
        ModelLoadError: If ``max_model_len`` exceeds the length up to which frequencies are constant.
    """
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind == "longrope":
            limit = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
        elif "dynamic" in kind:
            limit = config.max_position_embeddings
        else:
            continue
        if limit is not None and max_model_len > limit:
            raise ModelLoadError(
                f"{location}: its rotary embedding ({kind}) changes its frequencies beyond {limit} tokens, so that "
                f"results would depend on the other requests of a batch; set max_model_len to at most {limit} (it is "
                f"{max_model_len})"
            )


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rope parameters of the model, or one by one those of its layer types."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    yield from nested or ([given] if given else [])
