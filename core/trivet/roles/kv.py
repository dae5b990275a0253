"""The vocabulary of the KV negotiation: model → attention → cache → runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVKind = Literal["full", "sliding", "chunked", "recurrent"]

_ITEM_SIZES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
}


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """What one attention layer keeps per token. ``window`` counts tokens including the current one (sliding,
    chunked)."""

    layer: int
    kind: KVKind
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    v_head_dim: int | None = None  #: None: as ``head_dim``
    #: fields of :class:`trivet.roles.AttentionExtras` that its attention calls pass
    needs: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in this layer."""
        return self.num_kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim)) * _ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class AttentionSupport:
    """What an attention provider can do for a :class:`LayerKVSpec`; ``problem`` says why it cannot, for example because
    it does not know something that ``spec.needs`` names."""

    #: block sizes must be a multiple of this …
    block_size_multiple: int = 1
    #: … and at most this (None: any)
    block_size_max: int | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    layouts: tuple[str, ...] = ("NHD",)  #: [num_blocks, block_size, num_kv_heads, head_dim]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table per request. Groups of one pool may share block ids, see :class:`KVStorage`."""

    index: int
    layers: tuple[int, ...]
    kind: KVKind
    block_size: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVStorage:
    """One buffer of ``num_blocks`` pages; every layer listed keeps its pages there (layers of different groups may
    share it)."""

    layers: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the cache decided: groups with their tables, and buffers. Block 0 of every buffer is the null block."""

    specs: tuple[LayerKVSpec, ...]
    groups: tuple[KVGroup, ...]
    storage: tuple[KVStorage, ...]
    layout: str = "NHD"

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        specs = {s.layer: s for s in self.specs}
        sizes = {layer: group.block_size for group in self.groups for layer in group.layers}
        return sum(
            s.num_blocks * max(specs[layer].bytes_per_token * sizes[layer] for layer in s.layers) for s in self.storage
        )
