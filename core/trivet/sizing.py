"""How many blocks of which size: the arithmetic that cache providers share."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.errors import CacheMemoryError
from trivet.roles.cache import CacheRequirements
from trivet.roles.kv import AttentionSupport

_DEFAULT_BLOCK_SIZE = 16


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


def plan_blocks(need: CacheRequirements, block_size: int, *, memory: int | None, num_blocks: int | None) -> int:
    """Blocks (null block included) of ``block_size`` tokens over all layers; at least one request of the maximum
    length fits.

    Raises :class:`CacheMemoryError` with the sizes and the settings that would help; ``fits_tokens`` on it is the
    longest request that would fit."""
    page = block_size * sum(spec.bytes_per_token for spec in need.specs)
    if num_blocks is None:
        given = need.available_bytes if memory is None else memory
        num_blocks = given // page if page else 1 << 20
        # More than every slot at its full length is never used.
        num_blocks = min(num_blocks, 1 + need.max_num_seqs * -(-need.max_model_len // block_size))
    usable = num_blocks - 1
    if usable * block_size < need.max_model_len:
        fits = max(usable * block_size, 0)
        shorter = f"max_model_len to {fits} or less, or " if fits else ""
        raise CacheMemoryError(
            f"the KV cache cannot hold one request of max_model_len = {need.max_model_len} tokens: "
            f"{format_bytes(num_blocks * page)} are {max(usable, 0)} blocks of {block_size} tokens "
            f"({page / block_size:.0f} bytes per token), enough for {fits}. Set {shorter}"
            f"plugins.cache.memory to at least {format_bytes(page * (1 + -(-need.max_model_len // block_size)))}.",
            fits_tokens=fits,
        )
    return int(num_blocks)


def format_bytes(count: int) -> str:
    """A size as people write it in the configuration."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{-(-count * 10 // size) / 10:g}{unit}"
    return f"{count}B"
