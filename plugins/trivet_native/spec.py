"""What a decoder is made of, as plain data: everything that families differ in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trivet.roles.kv import KVKind

#: how a feed-forward network combines its gate and its other half
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One set of rotary frequencies. ``parameters`` are transformers' ``rope_parameters``; ``layer_type`` is their key
    in the configuration where layers differ."""

    parameters: Mapping[str, Any]
    head_dim: int
    layer_type: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts. Names are relative to the layer; ``{}`` in ``expert`` is the expert's number."""

    count: int
    top_k: int
    intermediate_size: int
    router: str
    expert: str
    gate_up: tuple[str, ...]
    down: str
    #: whether the weights of the chosen experts are made to add up to one
    normalise: bool = True
    #: whether the softmax is over the chosen experts' scores only
    softmax_of_chosen: bool = False
    #: whether the router and the experts have biases
    bias: bool = False
    #: slope and limit of the activation, if it is :class:`trivet_native.moe.ClampedSwiGLU`; None: the model's
    clamped: tuple[float, float] | None = None
    #: size of the expert that every token goes through, 0 if there is none
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What layers of one model differ in. ``rope`` indexes :attr:`DecoderSpec.ropes`; without ``experts`` the layer has
    one gated feed-forward network."""

    kind: KVKind = "full"
    window: int | None = None
    rope: int = 0
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder with grouped-query attention, RMS norms, rotary embeddings and gated feed-forward networks.

    Names of tensors are those of the Hugging Face checkpoint."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    activation: Activation
    #: factor of the attention scores
    scale: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    #: whether the output projection is the embedding when the file has none of its own
    tied: bool
    softcap: float | None = None
    final_softcap: float | None = None
    #: factor of the embeddings
    embed_scale: float = 1.0
    #: added to the weights of all norms (Gemma stores them less one)
    norm_offset: float = 0.0
    query_key_norms: bool = False
    #: norms of what attention and feed-forward networks put out, besides those of what goes in
    output_norms: bool = False
    sinks: bool = False
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_bias: bool = False
    out_bias: bool = False
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_bias: bool = False
    #: norms by their place: before attention, after it, before the feed-forward network, after it
    norms: Mapping[str, str] = field(default_factory=dict)

    @property
    def query_size(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim
