"""Options of the ``paged`` cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trivet_schemas.options import Options, Size, flat


class PagedOptions(Options):
    """KV memory in fixed-size blocks."""

    block_size: Annotated[int, Field(ge=1)] | None = Field(None, json_schema_extra=flat("block_size"))
    """Tokens per block; by default 16, or what the attention plugin needs."""
    memory: Size | None = Field(None, json_schema_extra=flat("kv_cache_memory_bytes"))
    """Memory for all blocks, such as `4GiB`; by default a share of what is free after the weights are loaded."""
    num_blocks: Annotated[int, Field(ge=2)] | None = Field(None, json_schema_extra=flat("num_gpu_blocks_override"))
    """Exact number of blocks instead of `memory`, the null block included."""
    prefix_caching: Literal[False] = Field(False, json_schema_extra=flat("enable_prefix_caching"))
    """Sharing of equal prompt prefixes; this cache does not share blocks yet, so only `false` is accepted."""
