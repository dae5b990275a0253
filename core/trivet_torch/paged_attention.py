"""Storage of the KV cache in tensors, and attention over it by the plain PyTorch kernels.

Attention providers that have faster kernels for most calls build on it: storage, block operations and the calls that
their kernels do not cover are the same for all.
"""

from __future__ import annotations

import functools
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trivet.errors import CacheMemoryError
from trivet.roles import Attention, AttentionSupport
from trivet_kernels.reference import cache as kernels
from trivet_kernels.reference.attention import AttentionPlan, RowPlan, locate, paged_attention, plan_rows
from trivet_torch.memory import free_ram

if TYPE_CHECKING:
    from trivet.context import WorkerContext
    from trivet.roles import AttentionExtras, AttentionMetadata, KVLayout, KVStorage, LayerKVSpec

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_KINDS = ("full", "sliding", "chunked")
#: fields of AttentionExtras that it honours
_EXTRAS = ("alibi_slopes", "key_scale", "value_scale")

#: a window, and whether it is the length of a chunk
_Span = tuple[int | None, bool]


@dataclass(slots=True)
class _StepPlans:
    """A step's plans for one KV group, by span. ``rows`` is what groups with equal rows share."""

    rows: dict[_Span, RowPlan]
    located: dict[_Span, AttentionPlan] = field(default_factory=dict)


class PagedAttention(Attention):
    """Paged attention by PyTorch's own operations, the reference of every faster provider.

    Works on any device, with any block size, and with windows that slide or are chunks, soft caps, sinks, ALiBi, trees
    of drafts and value heads of another size than the key heads. The cache may be narrower than the model, down to
    8-bit floats: keys and values are rounded (and bounded by the type's largest number) when they are written, and
    every query sees the rounded ones, those of its own step too, so that results do not depend on how a prompt is cut.
    """

    def __init__(self, context: WorkerContext, options: None = None) -> None:
        self._context = context
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._chunked: frozenset[int] = frozenset()
        #: what the rows of the last step were, and plans that hold for all with equal rows
        self._rows: tuple[Any, dict[_Span, RowPlan]] = (None, {})

    def support(self, spec: LayerKVSpec) -> AttentionSupport:
        dtypes = tuple(name for name, dtype in _DTYPES.items() if _can_store(dtype, self._context.device))
        lacking = [name for name in spec.needs if name not in _EXTRAS]
        problem = None
        if spec.kind not in _KINDS:
            problem = f"layer {spec.layer} is of kind {spec.kind!r}, and this attention serves {', '.join(_KINDS)} only"
        elif spec.dtype not in dtypes:
            problem = f"a KV cache in {spec.dtype} is not supported, only in {', '.join(dtypes)}"
        elif lacking:
            problem = f"layer {spec.layer} needs {', '.join(lacking)}, which this attention does not have"
        return AttentionSupport(dtypes=dtypes, problem=problem)

    def allocate(self, layout: KVLayout) -> None:
        """Raises :class:`trivet.errors.CacheMemoryError` when the memory is not there."""
        specs = {spec.layer: spec for spec in layout.specs}
        sizes = {layer: group.block_size for group in layout.groups for layer in group.layers}
        self._groups = {group.index: group.layers for group in layout.groups}
        self._chunked = frozenset(spec.layer for spec in layout.specs if spec.kind == "chunked")
        self._kv.clear()
        problem = CacheMemoryError(
            f"the KV cache of {layout.num_bytes / 2**20:.0f} MiB does not fit into the memory of "
            f"{self._context.device}; set plugins.cache.memory lower (or num_blocks, if that is set)"
        )
        # The system promises more than it has, and kills who takes its word for it.
        if torch.device(self._context.device).type == "cpu" and layout.num_bytes > free_ram():
            raise problem
        try:
            for storage in layout.storage:
                self._kv.update(_allocate(storage, specs, sizes, self._context.device))
        except (RuntimeError, MemoryError) as exc:
            self._kv.clear()
            raise problem from exc

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Attention.kv`. In an 8-bit cache they are of torch's float8 types; ``view(torch.uint8)`` gives
        their bytes for operations that do not know these."""
        return self._kv[layer]

    def prepare(self, meta: AttentionMetadata) -> None:
        # Layers of a group may differ in their windows; a plan is made when the first layer asks for one. Groups of a
        # step have the same rows, and runners may keep the tensors over steps, so the numbers themselves are compared.
        lengths = (meta.query_start, meta.seq_lens, meta.tree_lens, meta.tree_mask)
        rows = [None if part is None else part.cpu().numpy().tobytes() for part in lengths]
        if rows != self._rows[0]:
            self._rows = rows, {}
        meta.prepared = _StepPlans(self._rows[1])

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
        key_cache, value_cache = self._kv[layer]
        key_scale, value_scale = (None, None) if extras is None else (extras.key_scale, extras.value_scale)
        kernels.reshape_and_cache(
            key, value, key_cache, value_cache, meta.slot_mapping, key_scale=key_scale, value_scale=value_scale
        )
        # What was written and what is used in its stead must be the same numbers.
        exact = query.dtype == key.dtype == value.dtype == key_cache.dtype and key_scale is None and value_scale is None
        return paged_attention(
            query,
            key_cache,
            value_cache,
            self._plan(meta, window, layer in self._chunked),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=None if extras is None else extras.alibi_slopes,
            key=key if exact else None,
            value=value if exact else None,
            key_scale=key_scale,
            value_scale=value_scale,
        )

    def copy_blocks(self, group: int, pairs: Any) -> None:
        for cache in self._caches(group):
            kernels.copy_blocks(cache, pairs)

    def zero_blocks(self, group: int, blocks: Any) -> None:
        for cache in self._caches(group):
            kernels.zero_blocks(cache, blocks)

    def move_tokens(self, group: int, source: Any, destination: Any) -> None:
        for cache in self._caches(group):
            kernels.move_tokens(cache, source, destination)

    def shutdown(self) -> None:
        self._kv.clear()
        self._rows = None, {}

    def _plan(self, meta: AttentionMetadata, window: int | None, chunked: bool) -> AttentionPlan:
        """The step's plan for a window, made once for all layers of the group that have it."""
        if meta.prepared is None:
            self.prepare(meta)
        plans: _StepPlans = meta.prepared
        # A window as long as the longest context hides nothing, and all of that context is its first chunk.
        span = (None, False) if window is None or window >= meta.max_seq_len else (window, chunked)
        if span not in plans.located:
            if span not in plans.rows:
                plans.rows[span] = plan_rows(
                    meta.query_start,
                    meta.seq_lens,
                    window=span[0],
                    chunked=chunked,
                    tree_lens=meta.tree_lens,
                    tree_mask=meta.tree_mask,
                )
            plans.located[span] = locate(plans.rows[span], meta.block_table, meta.block_size)
        return plans.located[span]

    def _caches(self, group: int) -> list[Tensor]:
        return [cache for layer in self._groups[group] for cache in self._kv[layer]]


@functools.cache
def _can_store(dtype: torch.dtype, device: str) -> bool:
    """Whether torch has numbers of this type on the device; some backends lack the 8-bit ones."""
    try:
        torch.ones(1, device=device).to(dtype).float()
    except (RuntimeError, TypeError):
        return False
    return True


def _allocate(
    storage: KVStorage, specs: dict[int, LayerKVSpec], block_sizes: dict[int, int], device: str
) -> dict[int, tuple[Tensor, Tensor]]:
    """The keys and values of the layers of one buffer, as views ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    A page holds a block's keys, then its values. Where the layers' shapes allow it without taking more memory, all keys
    come first and then all values, which makes tokens follow each other through the whole buffer.
    """
    shapes: dict[int, tuple[tuple[int, int, int], tuple[int, int, int], torch.dtype]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for layer in storage.layers:
        spec, block_size, dtype = specs[layer], block_sizes[layer], _DTYPES[specs[layer].dtype]
        key = (block_size, spec.num_kv_heads, spec.head_dim)
        value = (block_size, spec.num_kv_heads, spec.v_head_dim or spec.head_dim)
        shapes[layer] = key, value, dtype
        sizes[layer] = torch.Size(key).numel() * dtype.itemsize, torch.Size(value).numel() * dtype.itemsize
    page = _aligned(max(key + value for key, value in sizes.values()))
    key_page = _aligned(max(key for key, _ in sizes.values()))
    value_page = _aligned(max(value for _, value in sizes.values()))
    if key_page + value_page <= page:
        keys = _zeros(storage.num_blocks, key_page, device)
        values = _zeros(storage.num_blocks, value_page, device)
        return {
            layer: (_view(keys, 0, key, dtype), _view(values, 0, value, dtype))
            for layer, (key, value, dtype) in shapes.items()
        }
    pages = _zeros(storage.num_blocks, page, device)
    return {
        layer: (_view(pages, 0, key, dtype), _view(pages, sizes[layer][0], value, dtype))
        for layer, (key, value, dtype) in shapes.items()
    }


def _zeros(num_blocks: int, page: int, device: str) -> Tensor:
    """``[num_blocks, page]`` zero bytes."""
    if torch.device(device).type != "cpu":
        return torch.zeros(num_blocks, page, dtype=torch.uint8, device=device)
    # Unlike torch's, numpy's zeros are pages that the system hands out when they are first written to, so a large cache
    # costs neither time at the start nor memory before it is used. They begin 16 bytes behind such a page, where every
    # head of a token would lie in one line of the processor's cache more than it has bytes for.
    size = num_blocks * page
    memory = torch.from_numpy(np.zeros(size + mmap.PAGESIZE, np.uint8))
    first = -memory.data_ptr() % mmap.PAGESIZE
    return memory[first : first + size].view(num_blocks, page)


def _aligned(size: int) -> int:
    """``size`` bytes rounded up, so that every page begins at a multiple of every item size."""
    return -(-size // 4) * 4


def _view(pages: Tensor, start: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """``[num_blocks, *shape]`` view of what begins at byte ``start`` of each page."""
    first, count = start // dtype.itemsize, torch.Size(shape).numel()
    return pages.view(dtype)[:, first : first + count].view(len(pages), *shape)
