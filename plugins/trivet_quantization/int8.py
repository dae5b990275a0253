"""Weights of eight bits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from trivet_quantization.base import PackingQuantization, as_stored, blocks_of, rounded
from trivet_quantization.blocks import FORMATS
from trivet_quantization.formats import Source, eight_bits

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.roles import StoredLinear
    from trivet_quantization.options import Int8Options


class Int8(PackingQuantization):
    """Rounds weights to eight bits, symmetric about zero."""

    _unused_by_torchao = frozenset({"group", "activation_group"})

    def __init__(self, context: WorkerContext, options: Int8Options) -> None:
        super().__init__(context, options)
        self._group = options.group

    def _source(self, part: StoredLinear) -> Source:
        form = eight_bits(self._group, part.shape[1])
        kind = blocks_of(part.stored)
        # Blocks of eight bits or less are taken as they are where they have the group's size.
        if kind is not None and dataclasses.replace(FORMATS[kind], factor=form.factor) == form:
            return as_stored(part, kind)
        return rounded(part, form)

    def _torchao_config(self, part: StoredLinear) -> Any:
        from trivet_quantization.torchao import eight_bit_config

        return eight_bit_config(dynamic=self._act_bits == 8)
