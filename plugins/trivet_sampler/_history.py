"""Which tokens requests have, and how often: what penalties ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trivet.plan import Bool, Int32, Int64, NewRequest
from trivet.rows import spans
from trivet_sampler._paths import ancestors

if TYPE_CHECKING:
    from trivet.roles import SampleRows

_FIRST_WIDTH = 256


class History:
    """The different tokens of some slots, each with its number in the output, kept up to date token by token.

    Counting a step's tokens takes time proportional to these, not to the texts. Slots without penalties are left out.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        n = max_num_seqs
        self.has: Bool = np.zeros(n, np.bool_)  #: [max_num_seqs] slots that are counted
        self._vocab_size = vocab_size
        self._num_prompt: Int32 = np.zeros(n, np.int32)
        self._with_prompt: Bool = np.zeros(n, np.bool_)
        self._seen: Int32 = np.zeros(n, np.int32)  # known tokens that are counted
        self._lengths: Int32 = np.zeros(n, np.int32)  # different tokens
        self._ids: Int32 = np.zeros((n, 0), np.int32)
        self._counts: Int32 = np.zeros((n, 0), np.int32)
        #: where a slot's list has a token, from 1; untouched pages of this matrix cost no memory
        self._places: Int32 = np.zeros((n, 0), np.int32)

    def add(self, request: NewRequest, *, with_prompt: bool) -> None:
        """Count a request's known tokens; ``with_prompt``: list those that are in the prompt only, too."""
        slot = request.slot
        if not self._places.shape[1]:
            self._places = np.zeros((len(self.has), self._vocab_size), np.int32)
        self.has[slot], self._with_prompt[slot] = True, with_prompt
        self._num_prompt[slot] = request.num_prompt
        self._begin(slot, request.token_ids)
        self._seen[slot] = len(request.token_ids)
        self._count(np.full(len(request.token_ids) - request.num_prompt, slot), request.token_ids[request.num_prompt :])

    def remove(self, slot: int) -> None:
        """Forget a slot."""
        if self.has[slot]:
            self._places[slot, self._ids[slot, : self._lengths[slot]]] = 0
            self._lengths[slot] = 0
            self.has[slot] = False

    def tokens(self, rows: SampleRows, chosen: Int64) -> tuple[Int32, Int32, Int32]:
        """The different tokens before each of the logits rows ``chosen`` ``[m]`` of slots that are counted, drafts
        included: ``[m + 1]`` offsets, ``[t]`` ids and ``[t]`` how often each is in the output."""
        slots = rows.row_slots[chosen]
        self._catch_up(np.unique(slots), rows)
        lengths = self._lengths[slots]
        offsets, columns = spans(np.zeros(len(slots), np.int32), lengths)
        owners = np.repeat(slots, lengths)
        ids, counts = self._ids[owners, columns], self._counts[owners, columns]
        if not len(rows.drafts.values):
            return offsets, ids, counts
        keys = [active * self._vocab_size + drafts for active, drafts in ancestors(rows, chosen)]
        if not keys:
            return offsets, ids, counts
        pairs, times = np.unique(np.concatenate(keys), return_counts=True)
        row, token = np.divmod(pairs, self._vocab_size)
        place = self._places[slots[row], token]
        listed = place > 0
        counts[offsets[row[listed]] + place[listed] - 1] += times[listed]
        new = ~listed
        order = np.argsort(np.concatenate([np.repeat(np.arange(len(slots)), lengths), row[new]]), kind="stable")
        ids = np.concatenate([ids, token[new].astype(np.int32)])[order]
        counts = np.concatenate([counts, times[new].astype(np.int32)])[order]
        offsets = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths + np.bincount(row[new], minlength=len(slots)), out=offsets[1:])
        return offsets, ids, counts

    def _begin(self, slot: int, token_ids: Int32) -> None:
        prompt = token_ids[: self._num_prompt[slot]] if self._with_prompt[slot] else token_ids[:0]
        ids = np.unique(prompt)
        self._widen(len(ids))
        self._ids[slot, : len(ids)] = ids
        self._counts[slot, : len(ids)] = 0
        self._places[slot, ids] = np.arange(1, len(ids) + 1)
        self._lengths[slot] = len(ids)
        self._seen[slot] = self._num_prompt[slot]

    def _catch_up(self, slots: Int32, rows: SampleRows) -> None:
        assert rows.lengths is not None
        known = rows.lengths[slots]
        for slot in slots[known < self._seen[slots]].tolist():  # tokens were taken back
            self._places[slot, self._ids[slot, : self._lengths[slot]]] = 0
            self._begin(slot, rows.tokens[slot])
        counts = known - self._seen[slots]
        if counts.any():
            _, columns = spans(self._seen[slots], counts)
            owners = np.repeat(slots, counts)
            self._count(owners, rows.tokens[owners, columns])
            self._seen[slots] = known

    def _count(self, slots: Int32, ids: Int32) -> None:
        """Count output tokens, ``[t]`` each."""
        pairs, times = np.unique(slots.astype(np.int64) * self._vocab_size + ids, return_counts=True)
        owner, token = np.divmod(pairs, self._vocab_size)
        place = self._places[owner, token]
        new = np.flatnonzero(place == 0)
        if len(new):
            # Pairs are in the order of slots: the first new one of each.
            within = np.arange(len(new)) - np.searchsorted(owner[new], owner[new])
            place[new] = self._lengths[owner[new]] + within + 1
            self._widen(int(place[new].max()))
            self._ids[owner[new], place[new] - 1] = token[new]
            self._counts[owner[new], place[new] - 1] = 0
            self._places[owner[new], token[new]] = place[new]
            np.maximum.at(self._lengths, owner[new], place[new])
        self._counts[owner, place - 1] += times

    def _widen(self, width: int) -> None:
        old = self._ids.shape[1]
        if width <= old:
            return
        used = np.flatnonzero(self._lengths)
        for name in ("_ids", "_counts"):
            grown = np.zeros((len(self.has), max(width, 2 * old, _FIRST_WIDTH)), np.int32)
            grown[used, :old] = getattr(self, name)[used]
            setattr(self, name, grown)
