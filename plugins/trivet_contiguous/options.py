"""Options of the ``contiguous`` cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trivet.sizing import KVDtype
from trivet_schemas.options import Options, Size, flat


class ContiguousOptions(Options):
    """One run of memory per request, reserved ahead."""

    block_size: Annotated[int, Field(ge=1)] | None = Field(None, json_schema_extra=flat("block_size"))
    """Tokens per block, the unit of the reservation; by default 16, or what the attention plugin needs."""
    reservation: Literal["max", "pow2", "oracle"] = "max"
    """What a request reserves: `max` the longest context of all, `oracle` its prompt and `max_tokens`, which is exact
    when the end of sequence is ignored, `pow2` its prompt and the next power of two of `max_tokens`."""
    allocator: Literal["first_fit", "buddy"] = "first_fit"
    """How a place is found: `first_fit` takes the lowest that is long enough, `buddy` rounds up to powers of two."""
    memory: Size | None = Field(None, json_schema_extra=flat("kv_cache_memory_bytes"))
    """Memory for all requests, such as `4GiB`; by default a share of what is free after the weights are loaded."""
    num_blocks: Annotated[int, Field(ge=2)] | None = Field(None, json_schema_extra=flat("num_gpu_blocks_override"))
    """Exact number of blocks instead of `memory`, the null block included."""
    prefix_caching: Literal[False] = Field(False, json_schema_extra=flat("enable_prefix_caching"))
    """Contiguous memory cannot be shared: only `false` is accepted."""
    dtype: KVDtype = Field("auto", json_schema_extra=flat("kv_cache_dtype"))
    """Type of keys and values in the cache: `auto` is the model's; a narrower one, such as `fp8_e4m3`, holds more
    tokens where the attention plugin can read it."""
