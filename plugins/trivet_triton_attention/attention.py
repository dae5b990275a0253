"""The attention provider ``triton``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trivet.errors import PluginError
from trivet_kernels.triton import cache as kernels
from trivet_kernels.triton.attention import MAX_HEAD_DIM, Tree, paged_attention, plan_tree, shape_of
from trivet_kernels.triton.compat import runs_here
from trivet_kernels.triton.tune import TileCache, default_tiles
from trivet_torch.paged_attention import PagedAttention
from trivet_triton_attention.options import TritonAttentionOptions

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.context import WorkerContext
    from trivet.roles import AttentionExtras, AttentionMetadata, AttentionSupport, KVLayout, LayerKVSpec
    from trivet_kernels.triton.tune import Shape, Tiles


class TritonAttention(PagedAttention):
    """Paged attention by Triton kernels on CUDA and ROCm devices, in Triton's interpreter also on a CPU.

    Nothing waits for the device, and grids depend on the shapes of tensors and the metadata's maxima only. What is
    returned for tokens of no row is not defined.
    """

    capturable = True

    def __init__(self, context: WorkerContext, options: TritonAttentionOptions | None = None) -> None:
        """Raises :class:`trivet.errors.PluginError` where its kernels cannot run."""
        super().__init__(context)
        device = torch.device(context.device)
        if not runs_here(device):
            raise PluginError(
                f"attention 'triton' cannot run on device {context.device!r}: set plugins.attention.use to auto, or "
                "TRITON_INTERPRET=1 in the environment to try its kernels, slowly, without a GPU"
            )
        self._options = options or TritonAttentionOptions()
        #: by layer, number of query heads, their type, and whether there is a window
        self._tiles: dict[tuple[int, int, torch.dtype, bool], Tiles] = {}
        self._measured: TileCache | None = None
        if self._options.autotune and device.type == "cuda":
            self._measured = TileCache(torch.cuda.get_device_name(device))

    def support(self, spec: LayerKVSpec) -> AttentionSupport:
        support = super().support(spec)
        size = max(spec.head_dim, spec.v_head_dim or 0)
        if support.problem is None and size > MAX_HEAD_DIM:
            problem = f"layer {spec.layer} has heads of {size} elements, and its kernels serve up to {MAX_HEAD_DIM}"
            support = replace(support, problem=problem)
        return support

    def allocate(self, layout: KVLayout) -> None:
        super().allocate(layout)
        self._tiles.clear()

    def prepare(self, meta: AttentionMetadata) -> None:
        if meta.tree_lens is None:
            return
        tree = plan_tree(meta.tree_lens, meta.tree_mask)
        known = meta.prepared
        if isinstance(known, Tree) and known.depth.shape == tree.depth.shape:
            # A captured graph reads the tensors that it was captured with.
            for old, new in zip(known, tree, strict=True):
                old.copy_(new)
        else:
            meta.prepared = tree

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
        slopes, key_scale, value_scale = (
            (None, None, None) if extras is None else (extras.alibi_slopes, extras.key_scale, extras.value_scale)
        )
        if meta.tree_lens is not None and meta.prepared is None:
            self.prepare(meta)
        kernels.reshape_and_cache(
            key, value, key_cache, value_cache, meta.slot_mapping, key_scale=key_scale, value_scale=value_scale
        )
        return paged_attention(
            query,
            key_cache,
            value_cache,
            query_start=meta.query_start,
            seq_lens=meta.seq_lens,
            block_table=meta.block_table,
            max_query_len=meta.max_query_len,
            max_seq_len=meta.max_seq_len,
            scale=scale,
            window=window,
            chunked=layer in self._chunked,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=slopes,
            key_scale=key_scale,
            value_scale=value_scale,
            tree=meta.prepared,
            tiles=self._tiles_for(layer, query, key_cache, value_cache, window),
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

    def _tiles_for(
        self, layer: int, query: Tensor, key_cache: Tensor, value_cache: Tensor, window: int | None
    ) -> Tiles:
        known = (layer, query.shape[1], query.dtype, window is None)
        tiles = self._tiles.get(known)
        if tiles is None:
            shape = shape_of(query, key_cache, value_cache, window)
            tiles = self._tiles[known] = self._choose(shape, key_cache.shape[1])
        return tiles

    def _choose(self, shape: Shape, block_size: int) -> Tiles:
        """The tiles of a layer, measured if that was asked for and they are not known."""
        if self._measured is None:
            return default_tiles(shape)
        tiles = self._measured.get(shape)
        if tiles is None:
            if torch.cuda.is_current_stream_capturing():
                return default_tiles(shape)
            from trivet_kernels.triton.measure import measured_tiles

            tiles = measured_tiles(shape, block_size, torch.device(self._context.device))
            self._measured.put(shape, tiles)
        return tiles
