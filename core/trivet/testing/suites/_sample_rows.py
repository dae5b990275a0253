"""What samplers and logits processors are told of a batch, from rows written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trivet.plan import Int32, Ragged
from trivet.roles import SampleRows


@dataclass(slots=True)
class Row:
    """A sampling row: its slot, the output position of its first logits row, its drafts, and its logits rows."""

    slot: int
    position: int
    logits: NDArray[np.float32]  #: [1 + drafts, vocab_size]
    drafts: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    bits: NDArray[np.bool_] | None = None  #: [1 + drafts, vocab_size] allowed tokens

    def chain(self) -> list[int]:
        """Parents of the drafts, whether they form a tree or a chain."""
        return self.parents if self.parents is not None else list(range(-1, len(self.logits) - 2))

    def depths(self) -> list[int]:
        """How many tokens of the row precede each logits row."""
        depths = [0]
        for parent in self.chain():
            depths.append(depths[1 + parent] + 1)
        return depths

    def path(self, index: int) -> list[int]:
        """The drafts that precede logits row ``index``."""
        path: list[int] = []
        node = index - 1
        while node >= 0:
            path.insert(0, self.drafts[node])
            node = self.chain()[node]
        return path


def sample_rows_of(
    rows: Sequence[Row],
    tokens: Int32,
    lengths: Int32,
    prompts: Sequence[tuple[int, int, int, NDArray[np.float32]]] = (),
) -> tuple[NDArray[np.float32], SampleRows]:
    """Logits ``[L, vocab_size]`` and their rows; ``prompts`` are (slot, epoch, first position, logits)."""
    pieces = [row.logits for row in rows] + [logits for _, _, _, logits in prompts]
    counts = [len(piece) for piece in pieces]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = [row.position + depth for row in rows for depth in row.depths()]
    positions += [-1] * sum(counts[len(rows) :])
    owners = [row.slot for row in rows] + [slot for slot, _, _, _ in prompts]
    listed = [
        (slot, epoch, start, int(first), len(logits))
        for (slot, epoch, start, logits), first in zip(prompts, starts[len(rows) :], strict=False)
    ]
    trees = any(row.parents is not None for row in rows)
    sample_rows = SampleRows(
        plan_rows=np.arange(len(rows), dtype=np.int32),
        slots=np.array(owners[: len(rows)], np.int32),
        starts=starts[: len(rows) + 1],
        positions=np.array(positions, np.int32),
        row_slots=np.repeat(np.array(owners, np.int32), counts),
        drafts=Ragged.from_rows([row.drafts for row in rows]),
        draft_parents=Ragged.from_rows([row.chain() for row in rows]) if trees else None,
        prompt_rows=listed,
        tokens=tokens,
        lengths=lengths,
    )
    return np.concatenate(pieces), sample_rows


def packed_bits(rows: Sequence[Row], count: int) -> Int32:
    """``[count, ceil(vocab_size / 32)]`` bits of the rows' allowed tokens; rows without a grammar allow all."""
    allowed = np.ones((count, rows[0].logits.shape[1]), np.bool_)
    at = 0
    for row in rows:
        if row.bits is not None:
            allowed[at : at + len(row.logits)] = row.bits
        at += len(row.logits)
    return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
