"""The contiguous cache: what each reservation sets aside, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trivet.engine import Engine
from trivet.errors import CacheMemoryError, PluginError
from trivet.plan import Transfer
from trivet.roles import CacheTier, TierLoad, TierStore
from trivet.simulation import IdTokenizer, SimulatedExecutor, simple_layers
from trivet.testing.suites import CacheSuite
from trivet_contiguous.cache import ContiguousCache
from trivet_contiguous.options import ContiguousOptions
from trivet_schemas.sampling import SamplingParams

MAX_MODEL_LEN = 128


class TestContiguousPow2(CacheSuite):
    use = "contiguous"
    options = {"reservation": "pow2", "block_size": 4}


class TestContiguousOracle(CacheSuite):
    use = "contiguous"
    options = {"reservation": "oracle", "block_size": 3}


class TestContiguousBuddy(CacheSuite):
    use = "contiguous"
    options = {"allocator": "buddy", "block_size": 4}


class TestContiguousOracleBuddy(CacheSuite):
    use = "contiguous"
    options = {"reservation": "oracle", "allocator": "buddy", "block_size": 1, "num_blocks": 1 + 90}


def engine(*plugins: object, max_model_len: int | None = MAX_MODEL_LEN, **options: Any) -> Engine:
    executor = SimulatedExecutor(
        simple_layers(1, num_kv_heads=1, head_dim=1), vocab_size=9, max_model_len=MAX_MODEL_LEN, available_bytes=1 << 20
    )
    roles: dict[str, Any] = {"cache": {"use": "contiguous", "block_size": 4, "num_blocks": 1 + 200, **options}}
    config = {"model": "none", "max_model_len": max_model_len, "plugins": roles}
    return Engine(config, [executor, IdTokenizer(9), *plugins])


def held(reservation: str, prompt: int, outputs: int, allocator: str = "first_fit") -> tuple[int, int]:
    """Blocks in the table of a request, and blocks that are not free for others, after its first step."""
    one = engine(reservation=reservation, allocator=allocator)
    try:
        one.add_request("r", [1] * prompt, SamplingParams(max_tokens=outputs, ignore_eos=True))
        one.step()
        cache = one.parts.cache
        (table,) = cache.tables(int(one.table.order[0]))
        assert np.array_equal(np.diff(table), np.ones(len(table) - 1)), "the run is consecutive"
        stats = cache.stats()
        one.check_integrity()
        return len(table), stats.total - stats.free
    finally:
        one.shutdown()


@pytest.mark.parametrize(
    ("reservation", "prompt", "outputs", "blocks"),
    [
        ("max", 5, 25, MAX_MODEL_LEN // 4),
        ("oracle", 5, 25, 8),  # 30 tokens
        ("pow2", 5, 25, 10),  # 5 + 32 tokens: the paper's example of an output of 25
        ("pow2", 8, 32, 10),
        ("pow2", 8, 33, 18),
        ("pow2", 60, 65, MAX_MODEL_LEN // 4),  # 60 + 128 would exceed the context
    ],
)
def test_what_each_reservation_sets_aside(reservation: str, prompt: int, outputs: int, blocks: int) -> None:
    assert held(reservation, prompt, outputs) == (blocks, blocks)


def test_the_buddy_allocator_takes_a_power_of_two() -> None:
    assert held("oracle", 5, 32, "buddy") == (10, 16)
    assert held("oracle", 5, 27, "buddy") == (8, 8)


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("allocator", ["first_fit", "buddy"])
def test_requests_wait_for_a_run_and_all_memory_comes_back(reservation: str, allocator: str) -> None:
    one = engine(reservation=reservation, allocator=allocator, num_blocks=1 + 45)
    lengths = {f"r{i}": (1 + 7 * i % 30, 3 + 11 * i % 60) for i in range(25)}
    for name, (prompt, outputs) in lengths.items():
        one.add_request(name, [1] * prompt, SamplingParams(max_tokens=outputs, ignore_eos=True))
    waits: set[str] = set()
    outputs_of: dict[str, int] = {}
    while one.has_work:
        events = one.step()
        one.check_integrity()
        waits |= {wait.kind for name in one.context.requests if (wait := one.explain(name)) is not None}
        outputs_of |= {ended.request.request_id: ended.num_output for ended in events.finished}
    assert "memory" in waits
    assert outputs_of == {name: outputs for name, (_, outputs) in lengths.items()}
    stats = one.parts.cache.stats()
    assert stats.free == stats.total == 45
    one.shutdown()


def test_the_longest_request_must_fit_as_the_allocator_rounds_it() -> None:
    # 100 tokens are 25 blocks of 4, and 32 for the buddy allocator.
    assert engine(num_blocks=1 + 25, max_model_len=100).max_model_len == 100
    with pytest.raises(CacheMemoryError, match="max_model_len = 100") as caught:
        engine(num_blocks=1 + 25, max_model_len=100, allocator="buddy")
    assert caught.value.fits_tokens == 64
    assert engine(num_blocks=1 + 25, max_model_len=64, allocator="buddy").max_model_len == 64


class _Tier(CacheTier):
    endpoint = "tier"

    def holds(self, key: bytes) -> bool:
        return False

    def store(self, keys: Sequence[bytes]) -> TierStore:
        return TierStore([False] * len(keys))

    def load(self, keys: Sequence[bytes]) -> TierLoad:
        return TierLoad(blocking=True)

    def settled(self, transfer: Transfer, *, store: bool, ok: bool) -> None:
        pass

    def forget(self, keys: Sequence[bytes]) -> None:
        pass

    def reset(self) -> None:
        pass


def test_a_cache_tier_is_refused() -> None:
    with pytest.raises(PluginError, match=r"plugins\.cache_tier") as caught:
        engine(_Tier())
    assert "paged" in str(caught.value)


def test_a_narrower_type_holds_more_tokens() -> None:
    blocks = {
        dtype: engine(num_blocks=None, memory=1 << 12, max_model_len=64, dtype=dtype).parts.cache.stats().total
        for dtype in ("auto", "fp8_e4m3")
    }
    assert blocks == {"auto": (1 << 12) // 16 - 1, "fp8_e4m3": (1 << 12) // 8 - 1}


def test_an_attention_that_cannot_read_the_type_is_named() -> None:
    cache = ContiguousCache(None, ContiguousOptions(dtype="fp8_e5m2"))
    need = TestContiguousOracle().requirements()
    with pytest.raises(CacheMemoryError, match=r"plugins\.cache\.dtype"):
        cache.configure(need)
