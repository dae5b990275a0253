"""Options of the ``paged`` cache."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trivet.sizing import KVDtype
from trivet_schemas.options import Options, Size, flat


class PagedOptions(Options):
    """KV memory in fixed-size blocks."""

    block_size: Annotated[int, Field(ge=1)] | None = Field(None, json_schema_extra=flat("block_size"))
    """Tokens per block; by default 16, or what the attention plugin needs. Layers that keep fewer bytes per token than
    others may get blocks of a multiple of it."""
    memory: Size | None = Field(None, json_schema_extra=flat("kv_cache_memory_bytes"))
    """Memory for all blocks, such as `4GiB`; by default a share of what is free after the weights are loaded."""
    num_blocks: Annotated[int, Field(ge=2)] | None = Field(None, json_schema_extra=flat("num_gpu_blocks_override"))
    """Exact number of blocks instead of `memory`, the null block included."""
    prefix_caching: bool = Field(True, json_schema_extra=flat("enable_prefix_caching"))
    """Whether requests share the blocks of equal beginnings, also with requests that have ended."""
    dtype: KVDtype = Field("auto", json_schema_extra=flat("kv_cache_dtype"))
    """Type of keys and values in the cache: `auto` is the model's; a narrower one, such as `fp8_e4m3`, holds more
    tokens where the attention plugin can read it."""
