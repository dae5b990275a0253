"""Token sequences that outputs must not contain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trivet.plan import Int32, Int64, Ragged
from trivet_sampler._lists import SlotLists
from trivet_sampler._paths import before

if TYPE_CHECKING:
    from trivet.roles import SampleRows

#: matches any token before a word's last one
_ANY = -1
#: stands before an output's first token, and equals none
_NOTHING = -2


class BadWords:
    """The sequences of all slots: of each the last token, and those before it in reverse."""

    def __init__(self, max_num_seqs: int) -> None:
        self._lists = SlotLists(max_num_seqs, np.empty(0, np.int32), np.empty((0, 0), np.int32))
        self._num_prompt: Int32 = np.zeros(max_num_seqs, np.int32)
        self._longest: Int32 = np.zeros(max_num_seqs, np.int32)  #: tokens before the last one
        self._words: dict[int, Ragged] = {}
        self._width = 0
        self.has = self._lists.has  #: [max_num_seqs] slots with words

    def add(self, slot: int, words: Ragged, num_prompt: int) -> None:
        """Give a slot its words."""
        self._words[slot] = words
        self._num_prompt[slot] = num_prompt
        self._longest[slot] = longest = int(words.lengths.max()) - 1
        changed = [slot]
        if longest > self._width:
            self._width = longest
            changed = list(self._words)
        for each in changed:
            self._lists.set(each, *_columns(self._words[each], self._width))

    def remove(self, slot: int) -> None:
        """Take a slot's words away."""
        if self.has[slot]:
            self._lists.clear(slot)
            del self._words[slot]

    def forbidden(self, rows: SampleRows, chosen: Int64) -> tuple[Int64, Int32]:
        """Tokens that would complete a word in the logits rows ``chosen`` ``[m]``, whose slots have some: ``[t]`` index
        into ``chosen`` and ``[t]`` ids."""
        slots = rows.row_slots[chosen]
        row, (last, prefix) = self._lists.gather(slots)
        width = int(self._longest[slots].max())
        if width:
            tail = before(rows, chosen, width, self._num_prompt[slots], _NOTHING)
            prefix = prefix[:, :width]
            complete = ((prefix == _ANY) | (prefix == tail[row])).all(1)
            row, last = row[complete], last[complete]
        return row, last


def _columns(words: Ragged, width: int) -> tuple[Int32, Int32]:
    prefix = np.full((len(words), width), _ANY, np.int32)
    for index in range(len(words)):
        reverse = words.row(index)[-2::-1]
        prefix[index, : len(reverse)] = reverse
    return words.values[words.offsets[1:] - 1], prefix
