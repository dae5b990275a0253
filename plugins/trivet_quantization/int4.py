"""Weights of four bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet_quantization.base import PackingQuantization, as_stored, blocks_of, is_head, matches, rounded
from trivet_quantization.blocks import FORMATS
from trivet_quantization.formats import Source, eight_bits, four_bits

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.roles import StoredLinear
    from trivet_quantization.options import Int4Options

_GROUP = 32


class Int4(PackingQuantization):
    """Rounds most weights to four bits in groups of 32."""

    def __init__(self, context: WorkerContext, options: Int4Options) -> None:
        super().__init__(context, options)
        self._eight_bits, self._offsets, self._head = options.eight_bits, options.offsets, options.lm_head

    def _source(self, part: StoredLinear) -> Source:
        eight = self._head == 8 if is_head(part.name) else matches(part.name, self._eight_bits)
        kind = blocks_of(part.stored)
        if kind is not None and FORMATS[kind].bits == (8 if eight else 4):
            return as_stored(part, kind)
        return rounded(part, eight_bits(_GROUP, part.shape[1]) if eight else four_bits(offsets=self._offsets))
