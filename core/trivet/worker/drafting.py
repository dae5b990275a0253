"""Drafters in the worker: which of them proposes for which request, and their proposals as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trivet.plan import Int32, NewRequest, Ragged
from trivet.roles.drafter import Drafter, DraftInputs, Drafts

if TYPE_CHECKING:
    from trivet.roles.attention import Attention
    from trivet.roles.kv import KVLayout, LayerKVSpec


class DrafterPool:
    """All drafters of a worker behind one :meth:`propose`.

    Args:
        drafters: In configuration order; a request gets the first that serves it.
        max_num_seqs: Slots.
    """

    def __init__(self, drafters: Sequence[Drafter], max_num_seqs: int) -> None:
        self._drafters = tuple(drafters)
        #: slot → index of its drafter, -1: none
        self._chosen: Int32 = np.full(max_num_seqs, -1, np.int32)
        self._first_layers: list[int] = []

    def __len__(self) -> int:
        return len(self._drafters)

    @property
    def num_tokens(self) -> int:
        """Most proposals of any drafter."""
        return max((d.num_tokens for d in self._drafters), default=0)

    @property
    def lookahead(self) -> int:
        """KV positions that the most far-reaching drafter writes beyond the scheduled tokens."""
        return max((d.lookahead for d in self._drafters), default=0)

    @property
    def wants_hidden(self) -> bool:
        """Whether any drafter reads hidden states."""
        return any(d.wants_hidden for d in self._drafters)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose outputs any drafter reads."""
        if not self._drafters:
            return ()
        return tuple(sorted({layer for d in self._drafters for layer in d.hidden_layers}))

    @property
    def follows(self) -> bool:
        """Whether any drafter has to see every step."""
        return any(d.follows for d in self._drafters)

    def kv_specs(self, first_layer: int) -> list[LayerKVSpec]:
        """The drafters' layers, numbered from ``first_layer`` on."""
        specs: list[LayerKVSpec] = []
        self._first_layers = []
        for drafter in self._drafters:
            self._first_layers.append(first_layer + len(specs))
            own = drafter.kv_specs()
            specs += [replace(spec, layer=first_layer + len(specs) + i) for i, spec in enumerate(own)]
        return specs

    def bind(self, attention: Attention, layout: KVLayout) -> None:
        """Tell every drafter where its layers are."""
        for drafter, first_layer in zip(self._drafters, self._first_layers, strict=True):
            drafter.bind(attention, layout, first_layer)

    def add(self, request: NewRequest) -> None:
        """A request enters its slot."""
        chosen = next((i for i, d in enumerate(self._drafters) if d.serves(request)), -1)
        if chosen >= 0:
            self._drafters[chosen].add(request)
        self._chosen[request.slot] = chosen

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""
        chosen, self._chosen[slot] = int(self._chosen[slot]), -1
        if chosen >= 0:
            self._drafters[chosen].remove(slot)

    def propose(self, inputs: DraftInputs) -> Drafts:
        """Ask every drafter that has rows to propose for, or follows all steps, and join what they propose."""
        chosen = self._chosen[inputs.slots]
        asked: dict[int, Drafts] = {}
        for index, drafter in enumerate(self._drafters):
            k = np.where(chosen == index, inputs.k, 0).astype(np.int32)
            if drafter.follows or k.any():
                drafts = drafter.propose(replace(inputs, k=k))
                if len(drafts.tokens) != len(k) or (drafts.tokens.lengths > k).any():
                    raise ValueError(
                        f"{type(drafter).__name__} was asked for {k.tolist()} tokens per row and proposed "
                        f"{drafts.tokens.lengths.tolist()}"
                    )
                asked[index] = drafts
        if len(asked) == 1:
            return next(iter(asked.values()))
        return _joined([asked.get(i) for i in chosen.tolist()])


def _joined(parts: Sequence[Drafts | None]) -> Drafts:
    """Row ``i`` of the outcome is row ``i`` of ``parts[i]``."""
    tokens = Ragged.from_rows([() if p is None else p.tokens.row(i) for i, p in enumerate(parts)])
    if all(p is None or p.parents is None for p in parts):
        return Drafts(tokens)
    parents = [
        np.arange(-1, len(tokens.row(i)) - 1) if p is None or p.parents is None else p.parents.row(i)
        for i, p in enumerate(parts)
    ]
    return Drafts(tokens, Ragged.from_rows(parents))
