"""Options of the quantization providers."""

from __future__ import annotations

from typing import Literal

from trivet_schemas.options import Options


class _Common(Options):
    exclude: tuple[str, ...] = ()
    """Layers to leave alone: shell patterns for their names, such as `*.o_proj` or `model.layers.0.*`."""
    activations: Literal["int8", "int16"] = "int8"
    """What activations are rounded to in front of each product, on a CPU (a GPU multiplies them as they are) and by
    torchao. `int16` is as good as bfloat16 and takes twice as long where many tokens are computed at a time; a single
    stream is not slower."""
    activation_group: Literal[32, 64, 128] | None = 32
    """Values of an activation that share a scale, at least as many as share one of the weights', on a CPU. None: the
    whole row, which is least accurate."""


class _Rounding(_Common):
    backend: Literal["triton", "torchao"] = "triton"
    """What multiplies on a GPU: the Triton kernel of this package, or torchao (the extra `trivet[torchao]`), which has
    formats of its own: `group`, `offsets` and `activation_group` have no effect there, and `activations: int16` leaves
    activations as they are."""


class Int8Options(_Rounding):
    """Weights of eight bits, symmetric about zero."""

    activation_group: Literal[32, 64, 128] | None = 128
    """Values of an activation that share a scale, at least as many as share one of the weights', unless those have one
    for the whole row, on a CPU. None: the whole row, which is least accurate."""
    group: Literal[32, 64, 128] | None = None
    """Values of a row that share a scale. The longer, the faster and the less accurate; with 32 blocks of a GGUF file
    are taken over without loss. None: the whole row, which costs accuracy where activations have long groups, too."""
    lm_head: bool = True
    """Whether the output projection is quantised too."""


class Int4Options(_Rounding):
    """Weights of four bits in groups of 32, each with a scale and an offset."""

    lm_head: Literal[4, 8] | bool = 8
    """Bits of the output projection; true is 4, false leaves it alone."""
    eight_bits: tuple[str, ...] = ("*.v_proj", "*.down_proj", "*.w2")
    """Layers that keep eight bits, as patterns of names."""
    offsets: bool = True
    """Whether groups have an offset beside the scale; without, weights take 4.5 bits instead of 5 and are less
    accurate."""


class GgufOptions(_Common):
    """The precision of the file."""

    lm_head: bool = True
    """Whether the output projection keeps the file's blocks; otherwise it is computed in the model's dtype."""
