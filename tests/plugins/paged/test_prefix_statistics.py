"""What the statistics of the prefix cache count: admissions that succeed, each once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_kit import drain, engine, greedy


@pytest.mark.parametrize("num_blocks", [16, 18, 20, 25])
@pytest.mark.parametrize("tier", [False, True])
def test_who_lacks_memory_and_asks_again_is_counted_once(num_blocks: int, tier: bool) -> None:
    """Preempted requests wait for more room than a lookup knows of, and look again in every step."""
    rng = random.Random(0)
    prompts = [[rng.randrange(64) for _ in range(20)] for _ in range(6)]
    roles: dict[str, Any] = {"cache": {"use": "paged", "block_size": 4, "num_blocks": num_blocks}}
    if tier:
        roles["cache_tier"] = [{"use": "offload", "host_memory": "1MiB"}]
    with engine(scheduler={"use": "continuous", "max_num_batched_tokens": 24}, max_model_len=60, **roles) as e:
        for i, prompt in enumerate(prompts):
            e.add_request(str(i), prompt, greedy(30))
        planner, attempts, looked_up, found = e.parts.planner, 0, 0, 0
        allocate = planner._allocate

        def counting(request: Any, slot: int, *args: Any) -> bool:
            nonlocal attempts, looked_up, found
            known = int(e.table.num_known[slot])
            attempts += 1
            if not allocate(request, slot, *args):
                return False
            looked_up += known
            found += int(e.table.num_committed[slot])
            return True

        planner._allocate = counting  # type: ignore[method-assign]
        done = drain(e)
        stats = e.parts.cache.stats()
    assert sum(request.num_preemptions for request in done.values()) > 0
    assert attempts > len(done) + sum(request.num_preemptions for request in done.values())
    assert (stats.prefix_queries, stats.prefix_hits) == (looked_up, found)
    assert stats.tier_hits <= stats.prefix_hits
