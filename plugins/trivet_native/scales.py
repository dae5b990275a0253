"""Scales of keys and values in a cache of 8-bit floats, as checkpoints bring them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trivet.errors import ModelLoadError
from trivet.roles import AttentionExtras

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trivet_torch.weights.stored import StoredWeights

# Where the programs that calibrate models put them, beside a layer's projections; {} is k or v.
_NAMES = (
    "{}_scale",
    "attn.{}_scale",
    "{}_proj.{}_scale",
    "qkv_proj.{}_scale",
    "{}_cache.scale",
    "{}_proj.output_scale",
)
_FOR_BOTH = ("kv_scale", "attn.kv_scale")


def cache_scales(
    weights: StoredWeights, num_layers: int, num_kv_heads: int, device: torch.device
) -> list[AttentionExtras | None]:
    """For each layer what its keys and values are divided by in a cache of 8-bit floats: a number, or one per head.

    A scale that is not positive says that there is none; a layer with the scale of one of the two has it for both, as
    in vLLM. None: the file has none.

    Raises:
        ModelLoadError: There are neither one nor ``num_kv_heads`` of them.
    """
    scales: list[AttentionExtras | None] = []
    for layer in range(num_layers):
        path = f"model.layers.{layer}.self_attn"
        key, value = (_scale(weights, path, letter, num_kv_heads, device) for letter in "kv")
        if key is None and value is None:
            scales.append(None)
        else:
            one, other = (value if key is None else key), (key if value is None else value)
            scales.append(AttentionExtras(key_scale=one, value_scale=other))
    return scales


def _scale(
    weights: StoredWeights, path: str, letter: str, num_kv_heads: int, device: torch.device
) -> torch.Tensor | float | None:
    for name in _spellings(path, letter):
        if name not in weights.names:
            continue
        values = weights.tensor(name, torch.float32).flatten()
        if len(values) not in {1, num_kv_heads}:
            raise ModelLoadError(
                f"{weights.location}: tensor {name!r} has {len(values)} scales for {num_kv_heads} key heads; the "
                "weights belong to another model: download or convert it again"
            )
        if bool((values > 0).all()):
            return float(values[0]) if len(values) == 1 else values.to(device, copy=True)
    return None


def _spellings(path: str, letter: str) -> Iterator[str]:
    for name in _NAMES:
        yield f"{path}.{name.format(letter, letter)}"
    for name in _FOR_BOTH:
        yield f"{path}.{name}"
