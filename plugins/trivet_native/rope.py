"""Tables of rotary embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_native.spec import RopeSpec


def rope_table(config: Any, rope: RopeSpec, max_positions: int) -> Tensor:
    """``[max_positions, R]`` float32: ``R / 2`` cosines, then ``R / 2`` sines for each position, scaled by the
    attention factor of the rope type.

    Frequencies are those that transformers computes from ``config`` for a sequence of ``max_positions`` tokens, which
    matters for the types where they depend on it; see :mod:`trivet_torch.rope`.
    """
    frequencies, factor = _frequencies(config, rope, max_positions)
    angles = torch.arange(max_positions).float()[:, None] * frequencies.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(factor)


def _frequencies(config: Any, rope: RopeSpec, length: int) -> tuple[Tensor, float]:
    """Radians per position of each pair ``[R / 2]``, and the factor of cosines and sines."""
    parameters = rope.parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        width = int(rope.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute: Any = ROPE_INIT_FUNCTIONS[kind]
    frequencies, factor = compute(config, torch.device("cpu"), seq_len=length, layer_type=rope.layer_type)
    return frequencies, float(factor)
