"""The precision of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet.errors import PluginError
from trivet_quantization.base import PackingQuantization, as_stored, blocks_of

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.roles import StoredLinear
    from trivet_quantization.formats import Source
    from trivet_quantization.options import GgufOptions


class Gguf(PackingQuantization):
    """Takes over the blocks of a file: the same integers, in four or eight bits each."""

    def __init__(self, context: WorkerContext, options: GgufOptions) -> None:
        super().__init__(context, options)
        if self._accelerated:
            raise PluginError(
                f"quantization 'gguf' computes on CPUs only and the device is {context.device}: "
                "set plugins.quantization to int8 or int4, or leave it out"
            )

    def _reads(self, stored: str) -> bool:
        return blocks_of(stored) is not None

    def _source(self, part: StoredLinear) -> Source:
        kind = blocks_of(part.stored)
        assert kind is not None
        return as_stored(part, kind)

    def _torchao_config(self, part: StoredLinear) -> Any:
        raise AssertionError("not on an accelerator")
