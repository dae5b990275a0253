"""Rotary embeddings whose frequencies depend on a sequence's length.

transformers computes the frequencies of ``longrope`` and ``dynamic`` from the longest sequence of the batch, and cached
keys keep the frequencies of their time: results depend on batch mates and on how a prompt is cut. Here they are those
of a sequence of ``max_model_len`` tokens, for every request, from its first token to its last. Up to the length that a
model was first trained for that is what transformers computes for any sequence; with a larger ``max_model_len`` it is
what transformers computes for a sequence of that length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trivet import model_defaults
from trivet.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("trivet.model")


def context_length(config: Any, positions: int, wanted: int | None) -> int:
    """See :func:`trivet.model_defaults.context_length`; a shorter context than the model could have is logged.

    Args:
        config: The decoder's configuration.
        positions: What the configuration calls ``max_position_embeddings``.
        wanted: ``max_model_len`` as configured.
    """
    length = model_defaults.context_length(config.to_dict(), positions, wanted)
    if length < positions:
        logger.info(
            "the context is the %d tokens that the model was first trained for; set max_model_len, up to %d, for its "
            "factors for longer ones",
            length,
            positions,
        )
    return length


def fix_frequencies(location: str, model: nn.Module, config: Any, max_model_len: int) -> None:
    """Make the rotary embeddings of a model of transformers those of a sequence of ``max_model_len`` tokens.

    Args:
        location: What the user named, for messages.
        model: Its modules are changed.
        config: The decoder's configuration.
        max_model_len: The context length that the engine will run with.

    Raises:
        ModelLoadError: The model's own code computes frequencies that change below ``max_model_len``.
    """
    limits = {
        kind: limit
        for kind, limit in model_defaults.rope_limits(
            config.to_dict(), getattr(config, "max_position_embeddings", max_model_len)
        )
        if max_model_len > limit
    }
    if not limits:
        return
    fixed = [module for module in model.modules() if _fix(module, max_model_len)]
    if not fixed or not all(_is_constant(module, max_model_len) for module in fixed):
        kind, limit = next(iter(limits.items()))
        raise ModelLoadError(
            f"{location}: its rotary embedding ({kind}) changes its frequencies beyond {limit} tokens in code of its "
            "own, so that results would depend on the other requests of a batch; set max_model_len to at most "
            f"{limit} (it is {max_model_len})"
        )


def _fix(module: nn.Module, length: int) -> bool:
    """Whether the module is one of transformers' rotary embeddings with changing frequencies, which do not any more."""
    kinds = getattr(module, "rope_type", None)
    by_layer: dict[str | None, Any] = dict(kinds) if isinstance(kinds, Mapping) else {None: kinds}
    changing = [layer for layer, kind in by_layer.items() if kind == "longrope" or "dynamic" in str(kind)]
    for layer in changing:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix = "" if layer is None else f"{layer}_"
        buffer = getattr(module, f"{prefix}inv_freq")
        compute: Any = ROPE_INIT_FUNCTIONS[by_layer[layer]]
        frequencies, factor = compute(module.config, buffer.device, seq_len=length, layer_type=layer)
        setattr(module, f"{prefix}inv_freq", frequencies)
        setattr(module, f"{prefix}attention_scaling", factor)
        # What transformers updates before each use is told by the type.
        by_layer[layer] = "default"
    if changing:
        kept: Any = module
        kept.rope_type = by_layer if isinstance(kinds, Mapping) else by_layer[None]
    return bool(changing)


def _is_constant(module: nn.Module, length: int) -> bool:
    """Whether a position's cosines and sines are the same in a short sequence as in one of ``length`` tokens."""
    kinds = module.rope_type
    layers = list(kinds) if isinstance(kinds, Mapping) else [None]
    x = torch.zeros(1, 1, 1, device=next(module.buffers()).device)
    positions = torch.tensor([[1, length - 1]], device=x.device)
    for layer in layers:
        options = {} if layer is None else {"layer_type": layer}
        try:
            short, long = (module(x, position_ids=each, **options) for each in (positions[:, :1], positions))
        except TypeError:
            return False
        if not all(torch.equal(one, other[:, :1]) for one, other in zip(short, long, strict=True)):
            return False
    return True
