"""Sizes that nobody can mean are refused by name, before anything is made for them."""

from __future__ import annotations

from typing import Any

import pytest

from trivet.errors import CacheMemoryError
from trivet.roles.cache import CacheRequirements
from trivet.roles.kv import AttentionSupport, LayerKVSpec
from trivet.sizing import plan_blocks
from trivet_contiguous.cache import ContiguousCache
from trivet_contiguous.options import ContiguousOptions
from trivet_paged.cache import PagedCache
from trivet_paged.options import PagedOptions

_LAYER = LayerKVSpec(0, "full", num_kv_heads=2, head_dim=16, dtype="float32")
_NEED = CacheRequirements((_LAYER,), (AttentionSupport(),), available_bytes=0, max_model_len=256, max_num_seqs=4)


@pytest.mark.parametrize("huge", [2**31, 10**18, 2**70])
def test_more_blocks_than_there_can_be_are_refused(huge: int) -> None:
    with pytest.raises(CacheMemoryError, match=rf"plugins\.cache\.num_blocks: {huge} blocks"):
        plan_blocks(_NEED, 16, memory=None, num_blocks=huge)
    with pytest.raises(CacheMemoryError, match=r"plugins\.cache\.memory: .* blocks"):
        plan_blocks(_NEED, 16, memory=huge * 4096, num_blocks=None, keeps_content=True)


def test_too_few_blocks_are_told_in_blocks() -> None:
    """``num_blocks`` goes before ``memory``, so more of that would not help."""
    with pytest.raises(CacheMemoryError, match=r"or plugins\.cache\.num_blocks to at least 17\.") as caught:
        plan_blocks(_NEED, 16, memory=1 << 30, num_blocks=3)
    assert "plugins.cache.memory" not in str(caught.value)
    assert plan_blocks(_NEED, 16, memory=None, num_blocks=17) == 17


@pytest.mark.parametrize(
    "cache",
    [PagedCache(None, PagedOptions(num_blocks=2**30)), ContiguousCache(None, ContiguousOptions(num_blocks=2**24))],
    ids=["paged", "contiguous"],
)
def test_a_plan_that_is_never_carried_out_costs_no_memory(cache: Any) -> None:
    """Python keeps nothing per block before the workers have found room for them."""
    import tracemalloc

    tracemalloc.start(1)
    try:
        layout = cache.configure(_NEED)
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    assert layout.storage[0].num_blocks >= 2**24
    lists = sum(stat.size for stat in snapshot.statistics("filename") if "numpy" not in stat.traceback[0].filename)
    arrays = layout.storage[0].num_blocks * 3 * 4  # zeros, which the system hands out when they are first written to
    assert lists - arrays < 2**26
