"""Greedy tokens in float32 equal those of transformers' ``generate``, whatever comes back from a cache tier."""

from __future__ import annotations

import logging
from itertools import product
from pathlib import Path
from typing import Any

import kit
import pytest
from sharing import Session, findable

BLOCKS, BUDGETS = (1, 8, 16), (7, 64, 100_000)
AMPLE, LITTLE = "16MiB", "32KiB"  #: host memory for everything, and for a tenth of it


def settings(library: Any, family: str, block_size: int, budget: int, **tier: Any) -> dict[str, Any]:
    """A pool so small that nearly everything is evicted before it is wanted again."""
    chosen = kit.settings(library.path(family), family, block_size=block_size, budget=budget, small=True)
    chosen["plugins"]["cache_tier"] = [{"use": "offload", **tier}]
    return chosen


def tier_of(session: Session) -> Any:
    """The engine half of the tier."""
    (tier,) = session.engine.context.all("cache_tier")
    return tier


def host_cases() -> list[tuple[str, int, int, str]]:
    """Every family, every block size with hybrid windows, both policies."""
    families = [*kit.FAMILIES, "gemma3_text", "gemma3_text"]
    return [(f, BLOCKS[i % 3], BUDGETS[i // 3 % 3], ("lru", "arc")[i % 2]) for i, f in enumerate(families)]


def check_host(library: Any, family: str, block_size: int, budget: int, policy: str) -> None:
    groups, turns = library.rounds(family)
    with Session(settings(library, family, block_size, budget, host_memory=AMPLE, policy=policy)) as session:
        cold = session.check(groups)
        assert cold.evicted > 0
        warm = session.check(groups)
        assert warm.tier_hits > 0
        assert warm.cached == findable(groups.work, block_size), "what the pool lost, the tier has"
        assert session.check(turns).tier_hits > 0
        stats = tier_of(session).stats()
        assert stats.stored > 0
        assert stats.loaded > 0
        assert stats.dropped == 0
        assert session.cache.reset()
        assert session.run(groups.work[:1]).cached == [0], "a reset reaches the tier"


@pytest.mark.parametrize(("family", "block_size", "budget", "policy"), host_cases())
def test_host_memory(library: Any, family: str, block_size: int, budget: int, policy: str) -> None:
    check_host(library, family, block_size, budget, policy)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "block_size", "budget", "policy"), list(product(kit.FAMILIES, BLOCKS, BUDGETS, ("lru", "arc")))
)
def test_host_memory_cross_product(library: Any, family: str, block_size: int, budget: int, policy: str) -> None:
    check_host(library, family, block_size, budget, policy)


@pytest.mark.parametrize(("family", "policy"), [("qwen3", "arc"), ("gemma3_text", "lru"), ("mistral", "lru")])
def test_host_memory_that_has_room_for_a_part(library: Any, family: str, policy: str) -> None:
    groups, turns = library.rounds(family)
    with Session(settings(library, family, 8, 64, host_memory=LITTLE, policy=policy)) as session:
        found = sum(session.check(round_).tier_hits for round_ in (groups, groups, turns))
        stats = tier_of(session).stats()
        assert stats.dropped > 0, "the tier had to forget"
        assert stats.held <= stats.capacity
        # A turn whose beginning was evicted just now.
        one = session.run(groups.work[:1])
        session.run(groups.work[1:6])
        again = session.run(groups.work[:1])
        assert again.outputs == one.outputs
        assert found + again.tier_hits > 0


DISK = [
    ("llama", 8, 64, "lru"),
    ("gemma3_text", 1, 64, "lru"),
    ("gemma3_text", 8, 7, "arc"),
    ("gemma3_text", 16, 100_000, "lru"),
    ("mistral", 16, 7, "lru"),
    ("gpt_neox", 1, 100_000, "arc"),
]


@pytest.mark.parametrize(("family", "block_size", "budget", "policy"), DISK)
def test_disk_also_after_a_restart(
    library: Any, tmp_path: Path, family: str, block_size: int, budget: int, policy: str
) -> None:
    groups, turns = library.rounds(family)
    chosen = settings(
        library, family, block_size, budget, host_memory=LITTLE, disk_memory=AMPLE, path=str(tmp_path), policy=policy
    )
    with Session(chosen) as session:
        assert session.check(groups).evicted > 0
        warm = session.check(groups)
        assert warm.tier_hits > 0
        # Host memory has room for little of it, and for nothing more while all of it is being loaded or stored.
        assert sum(warm.cached) > sum(findable(groups.work, block_size)) / 2
    with Session(chosen) as session:
        restarted = session.check(groups)
        assert restarted.tier_hits > 0
        # What was left in the pool is gone with it.
        assert sum(restarted.cached) > sum(findable(groups.work, block_size)) / 2
        assert session.check(turns).tier_hits > 0


@pytest.mark.parametrize(
    ("family", "block_size", "damage"),
    [
        ("gemma3_text", 8, "flipped"),
        ("llama", 8, "cut off"),
        ("llama", 8, "removed"),
        ("gemma3_text", 8, "lost while running"),
    ],
)
def test_damaged_files_are_misses(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, block_size: int, damage: str
) -> None:
    groups, turns = library.rounds(family)
    chosen = settings(library, family, block_size, 64, host_memory=LITTLE, disk_memory="1MiB", path=str(tmp_path))
    with Session(chosen) as session:
        session.check(groups)
    files = sorted(tmp_path.rglob("*.kv"))
    assert files
    caplog.set_level(logging.WARNING)
    if damage != "lost while running":
        for file in files:
            spoil(file, damage)
    with Session(chosen) as session:
        if damage == "lost while running":
            for file in files:
                file.write_bytes(b"")
        ran = [session.check(round_) for round_ in (groups, groups, turns)]
        dropped = tier_of(session).stats().dropped
    if damage in ("flipped", "lost while running"):
        assert dropped > 0, "a block was looked for and found damaged"
    assert damage == "removed" or caplog.records, "damage is reported"
    assert sum(one.tier_hits for one in ran[1:]) > 0, "the tier goes on"


def spoil(file: Path, damage: str) -> None:
    """Damage the content of a file, its length, or its existence."""
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        # Behind header and table: content, not what is known about it.
        for at in range(len(content) // 16, len(content), 512):
            content[at] ^= 0x10
        file.write_bytes(content)
    elif damage == "cut off":
        file.write_bytes(content[: len(content) // 3])
    else:
        file.unlink()
