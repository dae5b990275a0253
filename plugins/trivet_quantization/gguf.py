"""The precision of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet_quantization.base import PackingQuantization, as_stored, blocks_of

if TYPE_CHECKING:
    from trivet.roles import StoredLinear
    from trivet_quantization.formats import Source


class Gguf(PackingQuantization):
    """Takes over the blocks of a file: the same integers, in four or eight bits each."""

    _only_reads = (
        "and gguf keeps the blocks of GGUF files (Q4_K and the like): set plugins.quantization.use to int8 or int4, "
        "which round weights when they are loaded"
    )

    def _reads(self, stored: str) -> bool:
        return blocks_of(stored) is not None

    def _source(self, part: StoredLinear) -> Source:
        kind = blocks_of(part.stored)
        assert kind is not None
        return as_stored(part, kind)
