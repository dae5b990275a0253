"""A tiny model without weights: its next token is a hash of all tokens before it, read through the paged KV cache.

Whatever goes wrong with blocks, tables, windows, positions or drafts changes the hash, so a test that compares
tokens with
:func:`reference_tokens` (a direct loop over the token list, no cache) sees it at once. Runs in numpy, in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.plan import Int32
from trivet.roles import (
    Attention,
    AttentionExtras,
    AttentionMetadata,
    AttentionSupport,
    ForwardBatch,
    ForwardOutput,
    KVLayout,
    LayerKVSpec,
    Model,
    ModelInfo,
)
from trivet.roles.kv import KVKind

UInt64 = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(x: UInt64) -> UInt64:
    """SplitMix64's finaliser (Steele et al., 2014), element by element."""
    with np.errstate(over="ignore"):
        x = (np.asarray(x, np.uint64) + np.uint64(_GOLDEN)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * _M1
        x = (x ^ (x >> np.uint64(27))) * _M2
        return x ^ (x >> np.uint64(31))


def _embed(token_ids: Any, positions: Any, salt: Any) -> UInt64:
    with np.errstate(over="ignore"):
        ids, places = np.asarray(token_ids).astype(np.uint64), np.asarray(positions).astype(np.uint64)
        return mix(ids * np.uint64(1_000_003) + places + np.asarray(salt, np.uint64))


def _salt(adapter: str | None) -> int:
    return 0 if adapter is None else int.from_bytes(adapter.encode()[:7], "little") << 8


def _layer(x: UInt64, seen: UInt64, layer: int) -> UInt64:
    with np.errstate(over="ignore"):
        return mix(x ^ mix(seen + np.uint64(layer + 1)))


def _logits(state: UInt64, vocab_size: int) -> NDArray[np.float64]:
    """``[n, vocab_size]`` values in [0, 8), all distinct for practical purposes."""
    grid = mix(state[:, None] ^ mix(np.arange(vocab_size, dtype=np.uint64)[None, :]))
    return (grid >> np.uint64(11)).astype(np.float64) * (8.0 / 2.0**53)


def _first_seen(position: int, window: int | None, chunked: bool) -> int:
    if window is None:
        return 0
    return position // window * window if chunked else max(0, position - window + 1)


def reference_states(
    tokens: Sequence[int],
    windows: Sequence[int | None],
    adapter: str | None = None,
    chunked: Sequence[bool] = (),
) -> UInt64:
    """``[n]`` final state of every position, computed without a cache. Windows of layers that are ``chunked`` are
    lengths of chunks; layers beyond the end of that list are not."""
    x = _embed(np.asarray(tokens), np.arange(len(tokens)), _salt(adapter))
    for layer, window in enumerate(windows):
        seen = np.zeros_like(x)
        for p in range(len(tokens)):
            first = _first_seen(p, window, layer < len(chunked) and chunked[layer])
            with np.errstate(over="ignore"):
                seen[p] = x[first : p + 1].sum(dtype=np.uint64)
        x = _layer(x, seen, layer)
    return x


def reference_logits(
    tokens: Sequence[int],
    vocab_size: int,
    windows: Sequence[int | None],
    adapter: str | None = None,
    chunked: Sequence[bool] = (),
) -> NDArray[np.float64]:
    """``[n, vocab_size]`` logits of every position, computed without a cache."""
    return _logits(reference_states(tokens, windows, adapter, chunked), vocab_size)


def reference_tokens(
    prompt: Sequence[int],
    count: int,
    *,
    vocab_size: int = 64,
    windows: Sequence[int | None] = (None,),
    adapter: str | None = None,
    chunked: Sequence[bool] = (),
) -> list[int]:
    """The greedy continuation of ``prompt``, ``count`` tokens long."""
    tokens = list(prompt)
    for _ in range(count):
        state = reference_states(tokens, windows, adapter, chunked)[-1:]
        tokens.append(int(_logits(state, vocab_size)[0].argmax()))
    return tokens[len(prompt) :]


class FakeAttention(Attention):
    """Sums the values that a query sees; one 64-bit word per token and layer."""

    def __init__(self, context: Any = None, options: Any = None) -> None:
        self._store: dict[int, UInt64] = {}

    def support(self, spec: LayerKVSpec) -> AttentionSupport:
        """Any block size, and nothing unusual."""
        return AttentionSupport(dtypes=("int64",), problem=f"it does not know {spec.needs[0]}" if spec.needs else None)

    def allocate(self, layout: KVLayout) -> None:
        """Fill the storage with noise: memory that was never written must not matter."""
        self._layout = layout
        self._chunked = frozenset(spec.layer for spec in layout.specs if spec.kind == "chunked")
        sizes = {layer: group.block_size for group in layout.groups for layer in group.layers}
        for storage in layout.storage:
            cells = storage.num_blocks * max(sizes[layer] for layer in storage.layers)
            buffer = mix(np.arange(cells, dtype=np.uint64))
            for layer in storage.layers:
                self._store[layer] = buffer

    def kv(self, layer: int) -> tuple[Any, Any]:
        """Keys and values are the same word here."""
        size = next(g.block_size for g in self._layout.groups if layer in g.layers)
        view = self._store[layer].reshape(-1, size, 1, 1)
        return view, view

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
        """Write, then sum what each query may see."""
        store, chunked = self._store[layer], layer in self._chunked
        store[np.asarray(meta.slot_mapping)] = np.asarray(value, np.uint64).reshape(-1)
        starts, ends = np.asarray(meta.query_start), np.asarray(meta.seq_lens)
        out = np.zeros(len(query), np.uint64)
        for row in range(len(ends)):
            n, count = int(ends[row]), int(starts[row + 1] - starts[row])
            drafts = 0 if meta.tree_lens is None else int(meta.tree_lens[row])
            for i in range(count):
                place = n - count + i
                first = _first_seen(place, window, chunked)
                seen = np.arange(first, place + 1)
                if drafts and i >= count - drafts:
                    node = i - (count - drafts)
                    own = np.flatnonzero(np.asarray(meta.tree_mask)[row, node, :drafts]) + n - drafts
                    depth = len(own)
                    first = _first_seen(n - drafts + depth - 1, window, chunked)
                    seen = np.r_[np.arange(first, n - drafts), own[max(0, first - n + drafts) :]]
                blocks = np.asarray(meta.block_table)[row, seen // meta.block_size]
                with np.errstate(over="ignore"):
                    out[starts[row] + i] = store[blocks * meta.block_size + seen % meta.block_size].sum(dtype=np.uint64)
        return out.reshape(-1, 1, 1)

    def _group_stores(self, group: int) -> list[tuple[UInt64, int]]:
        g = self._layout.groups[group]
        return [(self._store[layer], g.block_size) for layer in g.layers]

    def copy_blocks(self, group: int, pairs: Any) -> None:
        """Copy whole blocks."""
        for store, size in self._group_stores(group):
            view = store.reshape(-1, size)
            view[np.asarray(pairs)[:, 1]] = view[np.asarray(pairs)[:, 0]]

    def zero_blocks(self, group: int, blocks: Any) -> None:
        """Zero whole blocks."""
        for store, size in self._group_stores(group):
            store.reshape(-1, size)[np.asarray(blocks)] = 0

    def move_tokens(self, group: int, source: Any, destination: Any) -> None:
        """Copy single words."""
        for store, _ in self._group_stores(group):
            store[np.asarray(destination)] = store[np.asarray(source)]


class FakeModel(Model):
    """``windows`` has one entry per layer: None for full attention, or the number of tokens a layer sees. ``chunked``
    says of which layers that is the length of chunks; layers beyond its end slide."""

    def __init__(
        self,
        context: Any = None,
        options: Any = None,
        *,
        vocab_size: int = 64,
        max_model_len: int = 512,
        windows: Sequence[int | None] = (None,),
        chunked: Sequence[bool] = (),
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        given = options.model_dump() if options is not None else {}
        self.vocab_size = given.get("vocab_size", vocab_size)
        self.max_model_len = given.get("max_model_len", max_model_len)
        self.windows = tuple(given.get("windows", windows))
        self.chunked = tuple(given.get("chunked", chunked))
        self.eos_token_ids = tuple(given.get("eos_token_ids", eos_token_ids))

    def load(self) -> ModelInfo:
        """Nothing to load."""
        return ModelInfo(
            self.vocab_size,
            self.max_model_len,
            self.eos_token_ids,
            num_layers=len(self.windows),
            hidden_size=1,
            architecture="fake",
            tasks=("generate", "embed"),
            takes=("adapter", "ranges"),
        )

    def kv_specs(self) -> list[LayerKVSpec]:
        """One word per token and layer."""
        return [
            LayerKVSpec(i, self._kind(i), 1, 1, "int64", window, v_head_dim=0) for i, window in enumerate(self.windows)
        ]

    def _kind(self, layer: int) -> KVKind:
        if self.windows[layer] is None:
            return "full"
        return "chunked" if layer < len(self.chunked) and self.chunked[layer] else "sliding"

    def bind(self, attention: Attention, layout: KVLayout) -> None:
        """Keep the attention and the layers' groups."""
        self._attention = attention
        self._groups = {layer: group.index for group in layout.groups for layer in group.layers}

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Hash the batch's tokens with what they see."""
        salts: Any = 0
        if batch.adapters is not None and (np.asarray(batch.adapters) >= 0).any():
            names = [batch.adapter_names[a] if a >= 0 else None for a in np.asarray(batch.adapters).tolist()]
            salts = np.repeat(np.array([_salt(n) for n in names], np.uint64), np.asarray(batch.query_lens))
        x = _embed(batch.input_ids, batch.positions, salts)
        for layer, window in enumerate(self.windows):
            words = x.reshape(-1, 1, 1)
            meta = batch.attention[self._groups[layer]]
            seen = self._attention.forward(layer, words, words, words, meta, scale=1.0, window=window)
            x = _layer(x, seen.reshape(-1), layer)
        hidden = (x >> np.uint64(11)).astype(np.float64).reshape(-1, 1) / 2.0**53
        return ForwardOutput(_logits(x[np.asarray(batch.logits_indices)], self.vocab_size), hidden)


def as_int32(values: Sequence[int]) -> Int32:
    """A token list as the contracts want it."""
    return np.asarray(values, np.int32)
