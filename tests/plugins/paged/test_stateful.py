"""Random lives of the paged cache against a naive memory: blocks add up after every operation, a block that others hold
or that can be found is never written, and whatever is found is the KV of these very tokens in this very context."""

from __future__ import annotations

import random
from typing import Any

import pytest

from trivet.testing.suites import CacheSuite
from trivet.testing.suites._cache_lives import Lives
from trivet.testing.suites._cache_model import CacheModel

HYBRID: dict[str, Any] = {
    "kinds": ("full", "sliding", "full", "chunked"),
    "windows": (None, 6, None, 8),
    # The last layer has half the bytes per token of the others, so its blocks are twice as long.
    "heads": (2, 2, 2, 1),
}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one group": ({"block_size": 4, "num_blocks": 1 + 22}, {"windows": (None,)}),
    "one group, single tokens": ({"block_size": 1, "num_blocks": 1 + 90}, {"windows": (None,)}),
    "one group, tiny": ({"block_size": 5, "num_blocks": 1 + 8}, {"windows": (None,)}),
    "one group, tier": ({"block_size": 4, "num_blocks": 1 + 14}, {"windows": (None,), "tiers": (30,)}),
    "one group, single tokens, tier": ({"block_size": 1, "num_blocks": 1 + 50}, {"windows": (None,), "tiers": (90,)}),
    "one group, two tiers": ({"block_size": 5, "num_blocks": 1 + 10}, {"windows": (None,), "tiers": (6, 20)}),
    "sliding only": ({"block_size": 4, "num_blocks": 1 + 30}, {"windows": (6, 6)}),
    "sliding only, tier": ({"block_size": 4, "num_blocks": 1 + 14}, {"windows": (6, 6), "tiers": (20,)}),
    "full and sliding": ({"block_size": 4, "num_blocks": 1 + 40}, {"windows": (None, 6)}),
    "full and sliding, single tokens": ({"block_size": 1, "num_blocks": 1 + 150}, {"windows": (None, 6)}),
    "full and sliding, tier": ({"block_size": 4, "num_blocks": 1 + 24}, {"windows": (None, 6), "tiers": (40,)}),
    "hybrid": ({"block_size": 4, "num_blocks": 1 + 80}, HYBRID),
    "hybrid, tiny": ({"block_size": 5, "num_blocks": 1 + 32}, HYBRID),
    "hybrid, single tokens": ({"block_size": 1, "num_blocks": 1 + 220}, HYBRID),
    "hybrid, tier": ({"block_size": 4, "num_blocks": 1 + 48}, HYBRID | {"tiers": (60,)}),
    "hybrid, two tiers": ({"block_size": 5, "num_blocks": 1 + 32}, HYBRID | {"tiers": (10, 50)}),
    "no prefix cache": (
        {"block_size": 4, "num_blocks": 1 + 40, "prefix_caching": False},
        {"windows": (None, 6), "finds_prefixes": False},
    ),
}


def suite_of(options: dict[str, Any], settings: dict[str, Any]) -> CacheSuite:
    given = {"use": "paged", "on_demand": True, "finds_prefixes": True, "options": options}
    made: CacheSuite = type("Paged", (CacheSuite,), given | settings)()
    return made


def live(name: str, seed: int, steps: int) -> CacheModel:
    """A life of so many operations; after each, the model's checks, and that its view is the cache's own."""
    suite = suite_of(*CASES[name])
    model = suite.fresh(seed=seed)
    lives, rng = Lives(model), random.Random(seed)
    pool: Any = model.cache._pool
    for _ in range(steps):
        lives.operation(rng)
        model.sync()
        if model.cache.has_events:
            found = {(group, block) for group, index in enumerate(pool.index) for block in index.values()}
            told = {(group, block) for (group, _), (_, block) in model.memory.findable.items()}
            assert found == told, "events replay to exactly what can be found"
    lives.finish()
    return model


@pytest.mark.parametrize("name", CASES)
def test_short_lives(name: str) -> None:
    models = [live(name, seed, 200) for seed in range(2)]
    while "tier" in name and len(models) < 10 and not any(model.tier_hits for model in models):
        models.append(live(name, len(models), 200))
    if CASES[name][0].get("prefix_caching", True):
        assert sum(model.hits for model in models) > 0
    if "tier" in name:
        assert sum(model.tier_hits for model in models) > 0
        assert sum(model.num_stored for model in models) > 0


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_thousand_operations(name: str) -> None:
    """Over all cases: 17 of 6,000 each."""
    for seed in range(100, 120):
        live(name, seed, 300)
