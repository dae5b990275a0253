"""A drafter that runs a model of its own, with a KV layer behind the target's, over every token of its requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from trivet.hookspecs import hookimpl
from trivet.plan import Ragged
from trivet.provider import Provider
from trivet.roles import AttentionMetadata, Drafter, Drafts
from trivet.testing.fake_model import _embed, _layer, _logits


class OwnCacheDrafter(Drafter):
    """The target's own hash with one layer, so every proposal is right if, and only if, its cache holds what it should.
    Leaves requests with ``extra["drafter"]`` to others."""

    num_tokens = lookahead = 3
    follows = True

    def __init__(self, context: Any, options: Any) -> None:
        self._model = context.build("model", "fake")
        self._computed: dict[int, int] = {}

    def kv_specs(self) -> Any:
        return self._model.kv_specs()

    def bind(self, attention: Any, layout: Any, first_layer: int) -> None:
        self._attention, self._layer = attention, first_layer
        self._group = next(g.index for g in layout.groups if first_layer in g.layers)

    def serves(self, request: Any) -> bool:
        return "drafter" not in request.extra

    def add(self, request: Any) -> None:
        self._computed[request.slot] = request.num_computed

    def remove(self, slot: int) -> None:
        del self._computed[slot]

    def propose(self, inputs: Any) -> Drafts:
        out: list[list[int]] = [[] for _ in inputs.slots]
        for row, slot in enumerate(inputs.slots.tolist()):
            if slot not in self._computed:
                continue
            drawn, end = len(inputs.accepted.row(row)), int(inputs.batch.seq_lens[row])
            before = end - int(inputs.batch.query_lens[row])
            start, known = min(self._computed[slot], before), int(inputs.lengths[slot]) if drawn else end
            if drawn:
                assert known == end - inputs.num_drafts[row] + drawn
            tokens = inputs.tokens[slot, start:known].tolist()
            self._computed[slot] = known
            for _ in range(int(inputs.k[row])):
                out[row].append(self._next(inputs, slot, start, tokens))
                start, tokens = start + len(tokens), out[row][-1:]
            if not inputs.k[row]:
                self._next(inputs, slot, start, tokens)
        return Drafts(Ragged.from_rows(out))

    def _next(self, inputs: Any, slot: int, start: int, tokens: list[int]) -> int:
        """The token after ``tokens`` at positions ``start`` and up, whose words it writes."""
        table, size = inputs.tables[self._group][slot], inputs.block_sizes[self._group]
        places = np.arange(start, start + len(tokens))
        meta = AttentionMetadata(
            self._group,
            size,
            np.array([0, len(tokens)]),
            places[-1:] + 1,
            table[None],
            table[places // size] * size + places % size,
            len(tokens),
            int(places[-1]) + 1,
        )
        x = _embed(tokens, places, 0)
        words = x.reshape(-1, 1, 1)
        seen = self._attention.forward(self._layer, words, words, words, meta, scale=1.0)
        return int(_logits(_layer(x, seen.reshape(-1), 0)[-1:], 64)[0].argmax())


@hookimpl
def trivet_providers() -> list[Provider]:
    return [Provider("drafter", "own_cache", "draft_model:OwnCacheDrafter")]
