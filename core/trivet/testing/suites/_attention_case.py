"""Requests with paged contexts, advanced step by step through an attention provider and the reference side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.roles import Attention, AttentionMetadata, KVGroup, KVLayout, KVStorage, LayerKVSpec
from trivet.testing.reference_attention import ReferenceAttention
from trivet.testing.suites._base import require

NUM_BLOCKS = 240
TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(slots=True)
class Context:
    """A request: how many tokens are cached, and in which blocks."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(slots=True)
class Row:
    """What a step does to a context: ``count`` new tokens, the last of which are nodes of a tree with ``parents``."""

    context: Context
    count: int
    parents: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Extras:
    """What a layer asks of attention beyond a causal softmax."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunked: bool = False  #: the window is the length of chunks

    def first(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.chunked else max(position - self.window + 1, 0)


class Case:
    """One layer per entry of ``extras``, all of them in one KV group, in ``provider`` and in the reference."""

    def __init__(
        self,
        provider: Attention,
        tensor: Callable[[Any, str | None], Any],
        numpy: Callable[[Any], NDArray[Any]],
        *,
        shape: tuple[int, int, int, int | None],
        block_size: int,
        dtype: str,
        extras: Sequence[Extras],
        seed: int,
    ) -> None:
        self.provider, self.reference = provider, ReferenceAttention()
        self._tensor, self._numpy = tensor, numpy
        self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim = *shape[:3], shape[3] or shape[2]
        self.block_size, self.dtype, self.extras = block_size, dtype, extras
        self.rng = np.random.default_rng(seed)
        self.free = [int(b) for b in 1 + self.rng.permutation(NUM_BLOCKS - 1)]
        specs = tuple(
            LayerKVSpec(
                i,
                "chunked" if extra.chunked else "full",
                self.num_kv_heads,
                self.head_dim,
                dtype,
                extra.window if extra.chunked else None,
                v_head_dim=shape[3],
            )
            for i, extra in enumerate(extras)
        )
        layers = tuple(range(len(extras)))
        chunks = {extra.window for extra in extras} if all(extra.chunked for extra in extras) else set()
        alike = len(chunks) == 1
        group = KVGroup(0, layers, "chunked" if alike else "full", block_size, chunks.pop() if alike else None)
        layout = KVLayout(specs, (group,), tuple(KVStorage((layer,), NUM_BLOCKS) for layer in layers))
        for attention in (provider, self.reference):
            attention.allocate(layout)
        for layer in layers:
            for part in provider.kv(layer):
                part[...] = float("nan")  # what was never written must not matter

    # ------------------------------------------------------------------ steps

    def step(self, rows: Sequence[Row]) -> None:
        """Advance contexts and compare what both attentions return for every layer."""
        for row in rows:
            while len(row.context.blocks) * self.block_size < row.context.length + row.count:
                row.context.blocks.append(self.free.pop())
            row.context.length += row.count
        numbers = self._metadata(rows)
        reference_meta = AttentionMetadata(**numbers)
        meta = AttentionMetadata(
            **{k: self._tensor(v, None) if isinstance(v, np.ndarray) else v for k, v in numbers.items()}
        )
        self.provider.prepare(meta)
        total = int(numbers["query_start"][-1])
        for layer, extra in enumerate(self.extras):
            query, query_exact = self._random(total, self.num_heads, self.head_dim)
            key, key_exact = self._random(total, self.num_kv_heads, self.head_dim)
            value, value_exact = self._random(total, self.num_kv_heads, self.v_head_dim)
            sinks, sinks_exact = self._random(self.num_heads) if extra.sinks else (None, None)
            given: dict[str, Any] = {"scale": 0.4, "window": extra.window, "softcap": extra.softcap}
            out = self.provider.forward(layer, query, key, value, meta, sinks=sinks, **given)
            expected = self.reference.forward(
                layer, query_exact, key_exact, value_exact, reference_meta, sinks=sinks_exact, **given
            )
            self._compare(layer, out, expected, query, rows)

    def accept(self, row: Row, path: Sequence[int]) -> None:
        """Keep the nodes ``path`` of the tree that ``row`` computed, moved to where a chain would have put them."""
        context, trunk = row.context, row.context.length - len(row.parents)
        moves = [(trunk + node, trunk + i) for i, node in enumerate(path) if node != i]
        if moves:
            source, destination = (self._places(context, [m[side] for m in moves]) for side in (0, 1))
            self.provider.move_tokens(0, self._tensor(source, None), self._tensor(destination, None))
            self.reference.move_tokens(0, source, destination)
        context.length = trunk + len(path)

    def compare_storage(self, what: str, where: object) -> None:
        """Written cells hold the keys and values given, others what they held."""
        for layer in range(len(self.extras)):
            pairs = zip(self.provider.kv(layer), self.reference.kv(layer), strict=True)
            for found, expected in pairs:
                same = np.array_equal(self._numpy(found).astype(np.float64), expected, equal_nan=True)
                require(same, what, where, layer=layer, block_size=self.block_size, dtype=self.dtype)

    # ------------------------------------------------------------------ parts

    def _random(self, *shape: int) -> tuple[Any, NDArray[np.float64]]:
        """A tensor and its exact value after rounding to its type."""
        tensor = self._tensor(self.rng.standard_normal(shape).astype(np.float32), self.dtype)
        return tensor, self._numpy(tensor).astype(np.float64)

    def _places(self, context: Context, positions: Sequence[int]) -> NDArray[np.int64]:
        size = self.block_size
        return np.array([context.blocks[p // size] * size + p % size for p in positions], np.int64)

    def _metadata(self, rows: Sequence[Row]) -> dict[str, Any]:
        counts = [row.count for row in rows]
        lengths = [row.context.length for row in rows]
        table = np.zeros((len(rows), max(len(row.context.blocks) for row in rows)), np.int32)
        for r, row in enumerate(rows):
            table[r, : len(row.context.blocks)] = row.context.blocks
            # Blocks that no query of any layer sees any more may have been given away.
            first = min(extra.first(row.context.length - row.count) for extra in self.extras)
            table[r, : first // self.block_size] = 0
        numbers: dict[str, Any] = {
            "group": 0,
            "block_size": self.block_size,
            "query_start": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "seq_lens": np.array(lengths, np.int32),
            "block_table": table,
            "slot_mapping": np.concatenate(
                [self._places(row.context, range(n - row.count, n)) for row, n in zip(rows, lengths, strict=True)]
            ),
            "max_query_len": max(counts),
            "max_seq_len": max(lengths),
        }
        widest = max(len(row.parents) for row in rows)
        if widest:
            mask = np.zeros((len(rows), widest, widest), np.bool_)
            for r, row in enumerate(rows):
                for node, parent in enumerate(row.parents):
                    mask[r, node, node] = True
                    if parent >= 0:
                        mask[r, node] |= mask[r, parent]
            numbers |= {"tree_lens": np.array([len(row.parents) for row in rows], np.int32), "tree_mask": mask}
        return numbers

    def _compare(self, layer: int, out: Any, expected: NDArray[np.float64], query: Any, rows: Sequence[Row]) -> None:
        require(
            out.dtype == query.dtype and tuple(out.shape) == expected.shape,
            "forward returns [T, num_heads, v_head_dim] in the query's dtype",
            Attention.forward,
            dtype=out.dtype,
            shape=tuple(out.shape),
            expected_shape=expected.shape,
        )
        found = self._numpy(out).astype(np.float64)
        error = np.abs(found - expected) / np.maximum(1, np.abs(expected))
        worst = float(np.nan_to_num(error, nan=np.inf).max())
        if worst <= TOLERANCE[self.dtype]:
            return
        token = int(np.nan_to_num(error, nan=np.inf).max(axis=(1, 2)).argmax())
        row = int(np.searchsorted(np.cumsum([r.count for r in rows]), token, side="right"))
        require(
            False,
            "attention is the causal softmax over the row's own cached tokens, within its window; memory that belongs "
            "to no token of the row is not read",
            Attention.forward,
            difference=worst,
            allowed=TOLERANCE[self.dtype],
            token=token,
            row=f"{row}: {rows[row].count} tokens of {rows[row].context.length}, tree parents {rows[row].parents}",
            layer=f"{layer}: {self.extras[layer]}",
            block_size=self.block_size,
            heads=f"{self.num_heads} over {self.num_kv_heads}, head_dim {self.head_dim}, v_head_dim {self.v_head_dim}",
            dtype=self.dtype,
        )
