"""What only some slots have, and those in different numbers: rows of columns, gathered for many slots at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.plan import Bool, Int32, Int64
from trivet.rows import spans


class SlotLists:
    """Rows of parallel columns for each slot. Changing a slot's costs as much as they are; gathering costs nothing for
    slots that have none.

    Args:
        max_num_seqs: Slots.
        empty: Columns without rows, which say what dtypes and trailing shapes they have.
    """

    def __init__(self, max_num_seqs: int, *empty: NDArray[Any]) -> None:
        self.has: Bool = np.zeros(max_num_seqs, np.bool_)  #: [max_num_seqs] slots with rows
        self._rows: dict[int, tuple[NDArray[Any], ...]] = {}
        self._empty = empty
        self._columns = empty
        self._starts: Int32 = np.zeros(max_num_seqs, np.int32)
        self._counts: Int32 = np.zeros(max_num_seqs, np.int32)
        self._stale = False

    def set(self, slot: int, *columns: NDArray[Any]) -> None:
        """Give a slot its rows, instead of those it has."""
        self.clear(slot)
        if len(columns[0]):
            self._rows[slot] = columns
            self.has[slot] = self._stale = True

    def clear(self, slot: int) -> None:
        """Take a slot's rows away."""
        if self.has[slot]:
            del self._rows[slot]
            self.has[slot] = False
            self._counts[slot] = 0
            self._stale = True

    def gather(self, slots: Int32) -> tuple[Int64, tuple[NDArray[Any], ...]]:
        """The rows of ``slots`` ``[m]``, one slot after the other: ``[t]`` index into ``slots``, and the columns."""
        if self._stale:
            self._join()
        counts = self._counts[slots]
        _, at = spans(self._starts[slots], counts)
        return np.repeat(np.arange(len(slots)), counts), tuple(column[at] for column in self._columns)

    def _join(self) -> None:
        at = 0
        for slot, columns in self._rows.items():
            self._starts[slot], self._counts[slot] = at, len(columns[0])
            at += len(columns[0])
        self._columns = self._empty
        if self._rows:
            self._columns = tuple(np.concatenate(parts) for parts in zip(*self._rows.values(), strict=True))
        self._stale = False
