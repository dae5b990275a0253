"""Weights of four bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet_quantization.base import PackingQuantization, as_stored, blocks_of, rounded
from trivet_quantization.blocks import FORMATS
from trivet_quantization.formats import Source, eight_bits, four_bits
from trivet_quantization.names import is_head, matches

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.roles import StoredLinear
    from trivet_quantization.options import Int4Options

_GROUP = 32


class Int4(PackingQuantization):
    """Rounds most weights to four bits in groups of 32."""

    _unused_by_torchao = frozenset({"offsets", "activations", "activation_group"})

    def __init__(self, context: WorkerContext, options: Int4Options) -> None:
        super().__init__(context, options)
        self._eight_bits, self._offsets, self._head = options.eight_bits, options.offsets, options.lm_head

    def accepts(self, name: str, shape: tuple[int, ...], stored: str) -> bool:
        # torchao has whole groups only; the packing here fills the last one.
        whole = not self._torchao or shape[-1] % _GROUP == 0
        return whole and super().accepts(name, shape, stored)

    def _source(self, part: StoredLinear) -> Source:
        eight = self._keeps_eight(part.name)
        kind = blocks_of(part.stored)
        if kind is not None and FORMATS[kind].bits == (8 if eight else 4):
            return as_stored(part, kind)
        return rounded(part, eight_bits(_GROUP, part.shape[1]) if eight else four_bits(offsets=self._offsets))

    def _torchao_config(self, part: StoredLinear) -> Any:
        from trivet_quantization.torchao import eight_bit_config, four_bit_config

        return eight_bit_config(dynamic=False) if self._keeps_eight(part.name) else four_bit_config(_GROUP)

    def _keeps_eight(self, name: str) -> bool:
        return self._head == 8 if is_head(name) else matches(name, self._eight_bits)
