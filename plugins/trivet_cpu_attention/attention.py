"""The attention provider ``cpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trivet_kernels.cpu.attention import CachedAttention, Step
from trivet_kernels.cpu.build import library
from trivet_kernels.cpu.types import DTYPES
from trivet_torch.paged_attention import PagedAttention

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.context import WorkerContext
    from trivet.roles import AttentionExtras, AttentionMetadata, KVLayout


class _Prepared:
    """A step as the kernel takes it, and what the reference prepared should a layer need that."""

    __slots__ = ("reference", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        self.reference: Any = None


class CpuAttention(PagedAttention):
    """Paged attention by a compiled kernel on the CPU.

    The kernel serves float32 and bfloat16 models whose cache is of the same type. Narrower caches and trees of drafts
    are left to the operations of :class:`~trivet_torch.paged_attention.PagedAttention`, and so is everything where
    there is no compiler.
    """

    def __init__(self, context: WorkerContext, options: None = None) -> None:
        super().__init__(context, options)
        self._kernels: dict[int, CachedAttention] = {}

    def allocate(self, layout: KVLayout) -> None:
        super().allocate(layout)
        compiled = library() if self._native else None
        self._kernels = {}
        if compiled is not None:
            for layer, (keys, values) in self._kv.items():
                if keys.dtype in DTYPES and values.dtype == keys.dtype:
                    self._kernels[layer] = CachedAttention(compiled, keys, values)

    def prepare(self, meta: AttentionMetadata) -> None:
        if not self._kernels or meta.tree_lens is not None:
            super().prepare(meta)
            return
        meta.prepared = _Prepared(Step(meta.query_start, meta.seq_lens, meta.block_table, meta.slot_mapping))

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        extras: AttentionExtras | None = None,
    ) -> Tensor:
        prepared = meta.prepared
        if prepared is None:
            self.prepare(meta)
            prepared = meta.prepared
        if type(prepared) is not _Prepared:
            return super().forward(
                layer, query, key, value, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, extras=extras
            )
        kernel = self._kernels.get(layer)
        slopes = None
        if extras is not None:
            slopes = extras.alibi_slopes
            if extras.key_scale is not None or extras.value_scale is not None:
                kernel = None
        if kernel is not None and prepared.step.take(query, key, value) is kernel.dtype:
            return kernel(
                query,
                key,
                value,
                prepared.step,
                scale=scale,
                window=window,
                chunked=layer in self._chunked,
                softcap=softcap,
                sinks=sinks,
                alibi_slopes=slopes,
            )
        if prepared.reference is None:
            super().prepare(meta)
            prepared.reference = meta.prepared
        meta.prepared = prepared.reference
        try:
            return super().forward(
                layer, query, key, value, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, extras=extras
            )
        finally:
            meta.prepared = prepared

    def shutdown(self) -> None:
        self._kernels = {}
        super().shutdown()

    @property
    def _native(self) -> bool:
        return torch.device(self._context.device).type == "cpu" and library() is not None
