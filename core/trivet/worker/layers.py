"""Telling transfers of every layer that a forward pass has written, without asking anything of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trivet.roles.attention import Attention, AttentionMetadata

if TYPE_CHECKING:
    from trivet.roles.connector import TransferWorker
    from trivet.roles.kv import AttentionSupport, KVLayout, LayerKVSpec


class LayerRelay(Attention):
    """Stands between a model and its attention provider while a transfer worker wants to know of layers.

    Args:
        attention: The provider; everything is done by it.
        listeners: Whose :meth:`trivet.roles.TransferWorker.layer_written` is called after every layer.
    """

    def __init__(self, attention: Attention, listeners: Sequence[TransferWorker]) -> None:
        self._attention, self._listeners = attention, tuple(listeners)

    def support(self, spec: LayerKVSpec) -> AttentionSupport:
        return self._attention.support(spec)

    def allocate(self, layout: KVLayout) -> None:
        self._attention.allocate(layout)

    def kv(self, layer: int) -> tuple[Any, Any]:
        return self._attention.kv(layer)

    def prepare(self, meta: AttentionMetadata) -> None:
        self._attention.prepare(meta)

    def forward(
        self, layer: int, query: Any, key: Any, value: Any, meta: AttentionMetadata, *, scale: float, **given: Any
    ) -> Any:
        out = self._attention.forward(layer, query, key, value, meta, scale=scale, **given)
        for listener in self._listeners:
            listener.layer_written(layer)
        return out

    def copy_blocks(self, group: int, pairs: Any) -> None:
        self._attention.copy_blocks(group, pairs)

    def zero_blocks(self, group: int, blocks: Any) -> None:
        self._attention.zero_blocks(group, blocks)

    def move_tokens(self, group: int, source: Any, destination: Any) -> None:
        self._attention.move_tokens(group, source, destination)
