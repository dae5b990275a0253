"""How many blocks of which size: the arithmetic that cache providers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from trivet.errors import CacheMemoryError
from trivet.roles.cache import CacheRequirements
from trivet.roles.kv import AttentionSupport

_DEFAULT_BLOCK_SIZE = 16
_MOST_BLOCKS = 2**31 - 1  # their numbers are int32

KVDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
"""Types that a KV cache may have; `fp8` is short for `fp8_e4m3`."""


def with_dtype(dtype: KVDtype, need: CacheRequirements) -> CacheRequirements:
    """The requirements with keys and values of another type than the model's; raises CacheMemoryError when the
    attention plugin cannot read it."""
    if dtype == "auto":
        return need
    if dtype == "fp8":
        dtype = "fp8_e4m3"
    for one in need.support:
        if dtype not in one.dtypes:
            raise CacheMemoryError(
                f"plugins.cache.dtype: the selected attention plugin has no KV cache in {dtype!r}, only in "
                f"{', '.join(one.dtypes)}"
            )
    return replace(need, specs=tuple(replace(spec, dtype=dtype) for spec in need.specs))


def choose_block_size(wanted: int | None, support: Sequence[AttentionSupport]) -> int:
    """A block size that every layer's attention can do; ``wanted`` is taken or refused, never changed."""
    for one in support:
        multiple, largest = one.block_size_multiple, one.block_size_max
        if wanted is not None and (wanted % multiple or (largest is not None and wanted > largest)):
            most = f" and at most {largest}" if largest is not None else ""
            raise CacheMemoryError(
                f"plugins.cache.block_size: {wanted} is not possible with the selected attention plugin, which needs a "
                f"multiple of {multiple}{most}"
            )
    if wanted is not None:
        return wanted
    size = max([_DEFAULT_BLOCK_SIZE, *(one.block_size_multiple for one in support)])
    return min([size, *(one.block_size_max for one in support if one.block_size_max is not None)])


def plan_blocks(
    need: CacheRequirements,
    block_size: int,
    *,
    memory: int | None,
    num_blocks: int | None,
    page_bytes: int | None = None,
    blocks_for: Callable[[int], int] | None = None,
    keeps_content: bool = False,
) -> int:
    """Blocks (null block included) of the pool; at least one request of the maximum length fits.

    Args:
        need: What the cache has to serve.
        block_size: Tokens per block.
        memory: Bytes, as the options name them; None: what is left on the device.
        num_blocks: Blocks, as the options name them.
        page_bytes: Bytes of a block over all buffers; by default of every layer's.
        blocks_for: Blocks that a request of so many tokens has at most at one time, over all groups; non-decreasing.
            By default those that cover its tokens.
        keeps_content: Whether more blocks than all slots can use at once are of use, because the content of those that
            are free is found again.

    Raises :class:`CacheMemoryError` with the sizes and the settings that would help; ``fits_tokens`` on it is the
    longest request that would fit."""
    page = block_size * sum(spec.bytes_per_token for spec in need.specs) if page_bytes is None else page_bytes
    count = blocks_for or (lambda tokens: -(-tokens // block_size))
    needed = count(need.max_model_len)
    option, least = "plugins.cache.num_blocks", str(1 + needed)
    if num_blocks is None:
        option, least = "plugins.cache.memory", format_bytes(page * (1 + needed))
        given = need.available_bytes if memory is None else memory
        num_blocks = given // page if page else 1 << 20
        if memory is None or not keeps_content:
            # More than every slot at its full length is never used; what is kept of ended requests is a by-product.
            num_blocks = min(num_blocks, 1 + need.max_num_seqs * needed)
    if num_blocks > _MOST_BLOCKS:
        raise CacheMemoryError(
            f"{option}: {num_blocks} blocks, {format_bytes(num_blocks * page)}, are more than the {_MOST_BLOCKS} that "
            "a KV cache can have; set it lower, or leave it out to take what is free"
        )
    usable = num_blocks - 1
    if usable < needed:
        fits = _longest(count, max(usable, 0), need.max_model_len)
        shorter = f"max_model_len to {fits} or less, or " if fits else ""
        per_token = page / block_size if blocks_for is None else page * needed / need.max_model_len
        raise CacheMemoryError(
            f"the KV cache cannot hold one request of max_model_len = {need.max_model_len} tokens: "
            f"{format_bytes(num_blocks * page)} are {max(usable, 0)} blocks of {block_size} tokens "
            f"({per_token:.0f} bytes per token), enough for {fits}. Set {shorter}"
            f"{option} to at least {least}.",
            fits_tokens=fits,
        )
    return int(num_blocks)


def _longest(count: Callable[[int], int], usable: int, limit: int) -> int:
    """The most tokens up to ``limit`` for which ``usable`` blocks suffice, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if count(middle) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def format_bytes(count: int) -> str:
    """A size as people write it in the configuration."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{-(-count * 10 // size) / 10:g}{unit}"
    return f"{count}B"
