"""Role ``attention``: paged attention and the writes to the KV cache."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.kv import AttentionSupport, KVLayout, LayerKVSpec


@dataclass(slots=True)
class AttentionMetadata:
    """What attention needs to know of a step, for one KV group. ``R`` rows, ``T`` tokens; tensors on the device.

    Row ``i``'s queries are tokens ``query_start[i]:query_start[i + 1]`` and sit at the end of its context,
    positions ``seq_lens[i] - query_len … seq_lens[i] - 1``; keys of position ``p`` are in block ``block_table[i, p
    // block_size]`` at offset ``p % block_size``. Entries of a table that are outside the window may be 0 or stale
    and must not be read."""

    group: int
    block_size: int
    query_start: Any  #: [R + 1] int32
    seq_lens: Any  #: [R] int32
    block_table: Any  #: [R, max_blocks] int32
    slot_mapping: Any  #: [T] int64: block * block_size + offset, where each token's keys and values are written
    max_query_len: int
    max_seq_len: int
    #: [R] int32 or None: the last ``tree_lens[i]`` queries of row ``i`` form a tree, see ``tree_mask``
    tree_lens: Any = None
    #: [R, max_tree, max_tree] bool or None: node ``j`` of row ``i`` may attend to node ``k``
    tree_mask: Any = None
    #: whatever :meth:`Attention.prepare` computed once for all layers
    prepared: Any = None


@dataclass(frozen=True, slots=True)
class AttentionExtras:
    """What the attention of few models takes. ``LayerKVSpec.needs`` names the fields that a layer will set, so that a
    provider that does not know one refuses the layer at the start; the record can therefore grow."""

    #: [num_heads] float32: a key ``d`` positions before the query gets ``-slope * d`` added to its score (ALiBi)
    alibi_slopes: Any = None
    #: scalars or [num_kv_heads] float32 by which stored keys and values are multiplied when they are read, and divided
    #: before they are written (a cache narrower than the model)
    key_scale: Any = None
    value_scale: Any = None


class Attention(Role):
    """Paged attention for a mixed batch: prefill chunks, decodes and verified drafts in one call per layer."""

    role: ClassVar[str] = "attention"
    #: whether :meth:`forward` with prepared metadata can be recorded into a CUDA graph, and replayed with other
    #: contents of the same tensors, for any lengths up to the metadata's maxima
    capturable: bool = False

    @abstractmethod
    def support(self, spec: LayerKVSpec) -> AttentionSupport:
        """What it can do for a layer on ``context.device``; ``problem`` set when it cannot serve it at all."""

    @abstractmethod
    def allocate(self, layout: KVLayout) -> None:
        """Allocate the storage of every layer. Called again (after a trial on a small layout) it replaces all."""

    @abstractmethod
    def kv(self, layer: int) -> tuple[Any, Any]:
        """The key and value storage of a layer, ``[num_blocks, block_size, num_kv_heads, head_dim]`` views."""

    def prepare(self, meta: AttentionMetadata) -> None:
        """Called once per step and group before the first layer; may set ``meta.prepared``. A runner that replays a
        captured graph calls it in the model's stead."""

    @abstractmethod
    def forward(
        self,
        layer: int,
        query: Any,
        key: Any,
        value: Any,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        extras: AttentionExtras | None = None,
    ) -> Any:
        """Write ``key``/``value`` ``[T, num_kv_heads, head_dim]`` to the cache, then attend causally.

        ``query`` is ``[T, num_heads, head_dim]``; returns ``[T, num_heads, v_head_dim]`` in the query's dtype. A
        query at position ``p`` sees keys at ``max(0, p - window + 1) … p``; in a layer whose spec is of kind
        ``chunked`` those at ``p // window * window … p``. The cache may be of another type than ``key`` and
        ``value``: every query then reads what was stored, those of the same step too. ``softcap`` bounds scores by
        ``c * tanh(s / c)``; ``sinks`` ``[num_heads]`` adds one logit per head to the softmax's denominator."""

    @abstractmethod
    def copy_blocks(self, group: int, pairs: Any) -> None:
        """Copy whole blocks within every layer of a group; ``pairs`` ``[n, 2]`` int32 (source, destination)."""

    @abstractmethod
    def zero_blocks(self, group: int, blocks: Any) -> None:
        """Fill blocks ``[n]`` of every layer of a group with zeros."""

    @abstractmethod
    def move_tokens(self, group: int, source: Any, destination: Any) -> None:
        """Copy single tokens' keys and values in every layer of a group (compaction of an accepted tree path);
        both ``[n]`` int64 flat positions as in ``slot_mapping``; sources are read before anything is written."""
