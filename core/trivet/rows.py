"""Array helpers of the planner: rows gathered in pieces, ragged gathers, block deltas."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trivet.plan import EMPTY_BOOL, EMPTY_I32, EMPTY_U8, BlockDelta, Bool, Int32, Int64, Ragged, UInt8


@dataclass(slots=True)
class Rows:
    """Parallel columns of scheduled rows, ``[R]`` each."""

    slots: Int32
    computed: Int32
    scheduled: Int32
    drafts: Int32
    samples: Bool
    pools: Bool
    source: UInt8
    logits: UInt8


@dataclass(slots=True)
class PlanRows:
    """Pieces of rows, in plan order."""

    num_tokens: int = 0
    _pieces: list[Rows] = field(default_factory=list)

    def add(
        self,
        slots: Int64,
        computed: Int32,
        scheduled: Int32,
        drafts: Int32,
        samples: Bool,
        pools: Bool,
        source: UInt8,
        logits: UInt8,
    ) -> None:
        """Append a piece."""
        self._pieces.append(
            Rows(slots.astype(np.int32), computed, scheduled.astype(np.int32), drafts, samples, pools, source, logits)
        )
        self.num_tokens += int(np.add.reduce(scheduled))

    def concatenate(self) -> Rows:
        """All pieces as one."""
        pieces = self._pieces
        if not pieces:
            e = EMPTY_I32
            return Rows(e, e, e, e, EMPTY_BOOL, EMPTY_BOOL, EMPTY_U8, EMPTY_U8)
        if len(pieces) == 1:
            return pieces[0]
        return Rows(*(np.concatenate([getattr(p, name) for p in pieces]) for name in Rows.__slots__))


def spans(starts: Int32, lengths: Int32) -> tuple[Int32, Int32]:
    """Offsets ``[n + 1]`` and flat indices of the runs ``starts[i] … starts[i] + lengths[i] - 1``."""
    count = len(lengths)
    if int(np.add.reduce(lengths)) == count == np.count_nonzero(lengths):
        return np.arange(count + 1, dtype=np.int32), starts  # one each, as in a batch that decodes
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = np.arange(offsets[-1], dtype=np.int32) + np.repeat(starts - offsets[:-1], lengths).astype(np.int32)
    return offsets, flat


def cells(rows: Int64, starts: Int32, lengths: Int32) -> tuple[Int64, Int64]:
    """Where in a matrix the runs ``[rows[i], starts[i]:starts[i] + lengths[i]]`` lie: row and column of each cell."""
    _, columns = spans(starts, lengths)
    return rows if columns is starts else np.repeat(rows, lengths), columns.astype(np.intp)


def gather_tokens(tokens: Int32, slots: Int64, starts: Int32, ends: Int32) -> Ragged:
    """Row ``i`` is ``tokens[slots[i], starts[i]:ends[i]]``."""
    lengths = ends - starts
    offsets, columns = spans(starts, lengths)
    rows = slots if columns is starts else np.repeat(slots, lengths)
    return Ragged(offsets, tokens[rows, columns.astype(np.intp)])


def block_delta(slots: list[int], blocks: list[int]) -> BlockDelta:
    """One row per run of equal slots."""
    if not slots:
        return BlockDelta(EMPTY_I32, Ragged.empty())
    s = np.array(slots, np.int32)
    if len(set(slots)) == len(slots):
        return BlockDelta(s, Ragged(np.arange(len(s) + 1, dtype=np.int32), np.array(blocks, np.int32)))
    changes = (s[1:] != s[:-1]).nonzero()[0]
    offsets = np.zeros(len(changes) + 2, np.int32)
    offsets[1:-1] = changes + 1
    offsets[-1] = len(s)
    return BlockDelta(s[offsets[:-1]], Ragged(offsets, np.array(blocks, np.int32)))
