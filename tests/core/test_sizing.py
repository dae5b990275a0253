"""The arithmetic of cache sizes, as its errors tell it."""

from __future__ import annotations

import pytest

from trivet.errors import CacheMemoryError
from trivet.roles.cache import CacheRequirements
from trivet.roles.kv import AttentionSupport, LayerKVSpec
from trivet.sizing import plan_blocks

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
