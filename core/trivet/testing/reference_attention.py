"""Paged attention from its definition, in numpy and float64: one query, one head and one key at a time.

The oracle of :class:`trivet.testing.suites.AttentionSuite`. Slow; for tests only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.roles import Attention, AttentionExtras, AttentionMetadata, AttentionSupport, KVLayout, LayerKVSpec

Float64 = NDArray[np.float64]


class ReferenceAttention(Attention):
    """Every layer has arrays of its own, filled with NaN: memory that was never written must not matter."""

    def __init__(self, context: Any = None, options: Any = None) -> None:
        self._kv: dict[int, tuple[Float64, Float64]] = {}
        self._layers: dict[int, tuple[int, ...]] = {}
        self._chunked: frozenset[int] = frozenset()

    def support(self, spec: LayerKVSpec) -> AttentionSupport:
        """Any block size; full, sliding and chunked layers."""
        problem = (
            None if spec.kind in {"full", "sliding", "chunked"} else f"layers of kind {spec.kind!r} are not served"
        )
        if spec.needs:
            problem = f"{', '.join(spec.needs)}: not known here"
        return AttentionSupport(dtypes=("float64", "float32"), problem=problem)

    def allocate(self, layout: KVLayout) -> None:
        """Fill with NaN."""
        specs = {spec.layer: spec for spec in layout.specs}
        sizes = {layer: group.block_size for group in layout.groups for layer in group.layers}
        self._layers = {group.index: group.layers for group in layout.groups}
        self._chunked = frozenset(spec.layer for spec in layout.specs if spec.kind == "chunked")
        for storage in layout.storage:
            for layer in storage.layers:
                spec = specs[layer]
                shape = (storage.num_blocks, sizes[layer], spec.num_kv_heads)
                width = spec.head_dim if spec.v_head_dim is None else spec.v_head_dim
                self._kv[layer] = np.full((*shape, spec.head_dim), np.nan), np.full((*shape, width), np.nan)

    def kv(self, layer: int) -> tuple[Float64, Float64]:
        """The arrays themselves."""
        return self._kv[layer]

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
        """Write, then attend query by query."""
        keys, values = (part.reshape(-1, *part.shape[2:]) for part in self._kv[layer])
        places = np.asarray(meta.slot_mapping)
        keys[places], values[places] = key, value
        dtype, query = np.asarray(query).dtype, np.asarray(query, np.float64)
        out = np.zeros((*query.shape[:2], values.shape[-1]))
        for row in range(len(meta.seq_lens)):
            first, last = int(meta.query_start[row]), int(meta.query_start[row + 1])
            for token in range(first, last):
                place = int(meta.seq_lens[row]) - (last - token)
                seen = visible(meta, row, place, window, chunked=layer in self._chunked)
                where = [
                    int(meta.block_table[row, p // meta.block_size]) * meta.block_size + p % meta.block_size
                    for p in seen
                ]
                for head in range(query.shape[1]):
                    group = head // (query.shape[1] // keys.shape[1])
                    scores = keys[where, group] @ query[token, head] * scale
                    if softcap is not None:
                        scores = softcap * np.tanh(scores / softcap)
                    extra = -np.inf if sinks is None else float(np.asarray(sinks, np.float64)[head])
                    top = max(float(scores.max()), extra)
                    weights = np.exp(scores - top)
                    out[token, head] = weights @ values[where, group] / (weights.sum() + np.exp(extra - top))
        return out.astype(dtype)

    def copy_blocks(self, group: int, pairs: Any) -> None:
        """Copy one block after the other."""
        for part in self._parts(group):
            for source, destination in np.asarray(pairs).tolist():
                part[destination] = part[source]

    def zero_blocks(self, group: int, blocks: Any) -> None:
        """Zero one block after the other."""
        for part in self._parts(group):
            for block in np.asarray(blocks).tolist():
                part[block] = 0

    def move_tokens(self, group: int, source: Any, destination: Any) -> None:
        """Read everything, then write it."""
        for part in self._parts(group):
            flat = part.reshape(-1, *part.shape[2:])
            flat[np.asarray(destination)] = flat[np.asarray(source)].copy()

    def _parts(self, group: int) -> list[Float64]:
        return [part for layer in self._layers[group] for part in self._kv[layer]]


def visible(meta: AttentionMetadata, row: int, index: int, window: int | None, *, chunked: bool = False) -> list[int]:
    """Places in the row's table that the query at place ``index`` sees.

    Places before the tree are positions. A node of the tree stands at the position of its depth, from which the window
    counts back, and sees its ancestors and itself. A window that is ``chunked`` reaches back to the last position that
    is a multiple of it."""
    tree = 0 if meta.tree_lens is None else int(meta.tree_lens[row])
    trunk = int(meta.seq_lens[row]) - tree

    def position(place: int) -> int:
        return place if place < trunk else trunk - 1 + int(np.asarray(meta.tree_mask)[row, place - trunk, :tree].sum())

    seen = list(range(index + 1))
    if index >= trunk:
        mask = np.asarray(meta.tree_mask)[row, index - trunk]
        seen = [*range(trunk), *(trunk + node for node in range(tree) if mask[node])]
    if window is None:
        return seen
    first = position(index) // window * window if chunked else position(index) - window + 1
    return [p for p in seen if position(p) >= first]
