"""The arithmetic of cache sizes, as its errors tell it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trivet.errors import CacheMemoryError
from trivet.roles.cache import CacheRequirements
from trivet.roles.kv import AttentionSupport, LayerKVSpec
from trivet.sizing import choose_block_size, format_bytes, plan_blocks, with_dtype

_LAYER = LayerKVSpec(0, "full", num_kv_heads=2, head_dim=16, dtype="float32")
_NEED = CacheRequirements((_LAYER,), (AttentionSupport(),), available_bytes=0, max_model_len=256, max_num_seqs=4)


@pytest.mark.parametrize("memory", [0, 1024, 4096])
def test_a_cache_without_room_for_a_token_asks_for_memory_only(memory: int) -> None:
    with pytest.raises(CacheMemoryError, match="Set plugins.cache.memory to at least 68KiB") as caught:
        plan_blocks(_NEED, 16, memory=memory, num_blocks=None)
    assert "max_model_len to" not in str(caught.value)


def test_a_cache_with_room_for_a_shorter_request_names_the_length() -> None:
    with pytest.raises(CacheMemoryError, match="Set max_model_len to 32 or less, or plugins.cache.memory to at least"):
        plan_blocks(_NEED, 16, memory=3 * 4096, num_blocks=None)


def test_a_size_that_is_left_open_is_never_more_than_all_requests_can_use() -> None:
    plenty = replace(_NEED, available_bytes=1 << 40)
    assert plan_blocks(plenty, 16, memory=None, num_blocks=None) == 1 + 4 * 256 // 16
    assert plan_blocks(plenty, 16, memory=None, num_blocks=None, keeps_content=True) == 1 + 4 * 256 // 16
    assert plan_blocks(plenty, 16, memory=1 << 24, num_blocks=None) == 1 + 4 * 256 // 16
    assert plan_blocks(plenty, 16, memory=1 << 24, num_blocks=None, keeps_content=True) == (1 << 24) // 4096


def test_the_longest_request_is_found_where_blocks_do_not_grow_with_tokens() -> None:
    def blocks_for(tokens: int) -> int:
        return min(3, -(-tokens // 16)) + -(-tokens // 16)  # a window of three blocks beside a full layer

    with pytest.raises(CacheMemoryError, match="enough for 112") as caught:
        plan_blocks(_NEED, 16, memory=None, num_blocks=11, blocks_for=blocks_for)
    assert caught.value.fits_tokens == 112
    assert plan_blocks(replace(_NEED, max_model_len=112), 16, memory=None, num_blocks=11, blocks_for=blocks_for) == 11
    with pytest.raises(CacheMemoryError):
        plan_blocks(replace(_NEED, max_model_len=113), 16, memory=None, num_blocks=11, blocks_for=blocks_for)


def test_the_memory_that_an_error_names_is_enough_and_no_less_is() -> None:
    with pytest.raises(CacheMemoryError, match="at least 68KiB"):
        plan_blocks(_NEED, 16, memory=(68 << 10) - 1, num_blocks=None)
    assert plan_blocks(_NEED, 16, memory=68 << 10, num_blocks=None) == 17


def test_a_type_that_attention_cannot_read_is_refused_with_those_it_can() -> None:
    with pytest.raises(CacheMemoryError, match="no KV cache in 'fp8_e4m3', only in float32, bfloat16, float16"):
        with_dtype("fp8_e4m3", _NEED)
    narrow = replace(_NEED, support=(AttentionSupport(dtypes=("float32", "fp8_e4m3")),))
    assert with_dtype("fp8_e4m3", narrow).specs[0].bytes_per_token == _LAYER.bytes_per_token // 4
    assert with_dtype("auto", _NEED) is _NEED


def test_block_sizes_are_what_attention_can_do() -> None:
    assert choose_block_size(None, [AttentionSupport()]) == 16
    assert choose_block_size(None, [AttentionSupport(), AttentionSupport(block_size_multiple=64)]) == 64
    assert choose_block_size(None, [AttentionSupport(block_size_max=8)]) == 8
    assert choose_block_size(48, [AttentionSupport(block_size_multiple=16)]) == 48
    for wanted, support in ((24, AttentionSupport(block_size_multiple=16)), (64, AttentionSupport(block_size_max=32))):
        with pytest.raises(CacheMemoryError, match=f"plugins.cache.block_size: {wanted} is not possible"):
            choose_block_size(wanted, [support])


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1B"), (1 << 10, "1KiB"), (1500, "1.5KiB"), (1 << 30, "1GiB"), ((1 << 30) + 1, "1.1GiB")]
)
def test_sizes_are_rounded_up_so_that_what_is_named_suffices(count: int, text: str) -> None:
    assert format_bytes(count) == text
