"""Conformance of ``cache_tier`` providers: what was evicted comes back as it was, or not at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from trivet.plan import Transfer
from trivet.roles import CacheTier, TransferWorker
from trivet.testing.fake_model import reference_tokens
from trivet.testing.suites._base import Suite, require
from trivet_schemas.sampling import SamplingParams

_BLOCK_SIZE = 4
_POOL = 1 + 18  # blocks: one request of the full length and a little more
_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 6, None))


class CacheTierSuite(Suite):
    """Runs both halves of a tier in engines on the fakes, whose tokens depend on every cached value, and asks its
    engine half alone.

    The options must leave room for at least :attr:`room` blocks.
    """

    role: ClassVar[str] = "cache_tier"
    #: blocks of which the tier keeps all, if no others come
    room: ClassVar[int] = 64

    # ------------------------------------------------------------------ building

    def transfer(self, keys: Sequence[bytes]) -> Transfer:
        """A transfer of blocks with these keys, as :meth:`CacheTier.settled` gets it."""
        blocks = np.arange(1, 1 + len(keys), dtype=np.int32)
        return Transfer(1, "", -1, -1, 0, 0, [blocks], list(keys), blocking=True)

    def small(self, windows: Sequence[int | None] = (None,), **roles: Any) -> Any:
        """An engine whose pool is so small that conversations push each other out."""
        cache = {"use": "paged", "block_size": _BLOCK_SIZE, "num_blocks": _POOL * len(windows)}
        model = {"use": "fake", "windows": list(windows)}
        return self.engine(max_model_len=64, **{"cache": cache, "model": model} | roles)

    def run(self, engine: Any, work: Sequence[Sequence[int]], count: int, windows: Sequence[int | None]) -> None:
        """Generate for every prompt and compare with the reference."""
        for i, prompt in enumerate(work):
            engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        while engine.has_work:
            for end in engine.step().finished:
                want = reference_tokens(work[int(end.request.request_id)], count, windows=windows)
                require(
                    end.request.output_ids == want,
                    "what a tier brings back is what was stored, so tokens are those of a run without it",
                    CacheTier.load,
                    request=end.request.request_id,
                    tokens=end.request.output_ids,
                    expected=want,
                )
            engine.check_integrity()
        stats = engine.parts.cache.stats()
        require(stats.free == stats.total, "transfers end, and their blocks are given back", TransferWorker.poll)

    # ------------------------------------------------------------------ both halves

    @pytest.mark.parametrize("windows", _WINDOWS, ids=str)
    def test_what_was_pushed_out_comes_back(self, windows: tuple[int | None, ...]) -> None:
        """Conversations one after the other, each longer than half the pool, and all of them again."""
        work = [[(7 * i + 3 * j) % 60 for j in range(41)] for i in range(4)]
        with self.small(windows) as engine:
            for prompt in [*work, *work]:
                self.run(engine, [prompt], 5, windows)
            stats = engine.parts.cache.stats()
            require(stats.evicted > 0, "the pool is too small for all of them", "trivet.testing.suites", stats=stats)
            require(stats.tier_hits > 0, "a tier keeps what it took and has room for", CacheTier.holds, stats=stats)
            figures = engine.context.all("cache_tier")[0].stats()
            require(
                figures.stored > 0 and figures.loaded > 0,
                "stats count the blocks that were stored and loaded",
                CacheTier.stats,
                stats=figures,
            )

    @pytest.mark.parametrize("windows", _WINDOWS, ids=str)
    def test_crowds_push_each_other_out(self, windows: tuple[int | None, ...]) -> None:
        """Many requests at once that share beginnings, preempted and resumed, with aborts in between."""
        rng = random.Random(3)
        heads = [[rng.randrange(60) for _ in range(24)] for _ in range(3)]
        with self.small(windows) as engine:
            for round_ in range(max(self.examples // 4, 2)):
                work = [[*rng.choice(heads)[: rng.randrange(4, 25)], rng.randrange(60)] for _ in range(12)]
                for i in range(3):
                    engine.add_request(f"gone{i}", work[i], SamplingParams(max_tokens=9, ignore_eos=True))
                for _ in range(round_ % 3):
                    engine.step()
                engine.abort([f"gone{i}" for i in range(3)])
                while engine.has_work:
                    engine.step()
                self.run(engine, work, rng.randrange(1, 20), windows)

    def test_forgetting_everything(self) -> None:
        """After a reset of the cache nothing is found in the tier."""
        prompt = [(5 * j) % 60 for j in range(41)]
        with self.small() as engine:
            self.run(engine, [prompt], 3, (None,))
            self.run(engine, [prompt[::-1]], 3, (None,))
            require(engine.parts.cache.reset(), "nothing is in use", CacheTier.reset)
            before = engine.parts.cache.stats()
            self.run(engine, [prompt], 3, (None,))
            after = engine.parts.cache.stats()
            require(
                after.prefix_hits == before.prefix_hits,
                "reset forgets everything",
                CacheTier.reset,
                found_tokens=after.prefix_hits - before.prefix_hits,
            )

    # ------------------------------------------------------------------ the engine half

    def bound(self) -> Any:
        """An engine's tier, bound to a layout; the engine stays as it is."""
        return self.small()

    def test_a_key_is_held_from_its_store_on(self) -> None:
        """Keys taken are held at once; a store that failed takes them back; others are not held."""
        keys = [bytes([i]) * 33 for i in range(8)]
        with self.bound() as engine:
            tier = engine.context.all("cache_tier")[0]
            require(not any(tier.holds(key) for key in keys), "unknown content is not held", CacheTier.holds)
            taken = tier.store(keys).taken
            require(len(taken) == len(keys), "taken says so for every key", CacheTier.store, taken=taken)
            require(
                [tier.holds(key) for key in keys] == taken,
                "what was taken is held at once",
                CacheTier.store,
                taken=taken,
            )
            mine = [key for key, took in zip(keys, taken, strict=True) if took]
            tier.settled(self.transfer(mine), store=True, ok=False)
            require(not any(map(tier.holds, keys)), "content whose store failed is not held", CacheTier.settled)
            tier.check_integrity()

    def test_damaged_content_is_not_offered_again(self) -> None:
        """``forget`` is for keys that it holds and for those that it does not."""
        keys = [bytes([i]) * 33 for i in range(4)]
        with self.bound() as engine:
            tier = engine.context.all("cache_tier")[0]
            mine = [key for key, took in zip(keys, tier.store(keys).taken, strict=True) if took]
            tier.settled(self.transfer(mine), store=True, ok=True)
            tier.forget([*mine[:1], b"\xff" * 33])
            require(
                [tier.holds(key) for key in mine] == [False] + [True] * (len(mine) - 1),
                "forget drops the keys it is given, and no others",
                CacheTier.forget,
            )
            tier.check_integrity()

    def test_what_is_being_loaded_stays(self) -> None:
        """Keys of a load are not dropped for others before it has ended."""
        with self.bound() as engine:
            tier = engine.context.all("cache_tier")[0]
            keys = [bytes([1, i]) * 16 for i in range(4)]
            mine = [key for key, took in zip(keys, tier.store(keys).taken, strict=True) if took]
            tier.settled(self.transfer(mine), store=True, ok=True)
            tier.load(mine)
            for i in range(4 * self.room):
                more = [i.to_bytes(4, "little") * 8]
                if tier.store(more).taken[0]:
                    tier.settled(self.transfer(more), store=True, ok=True)
            require(all(map(tier.holds, mine)), "what is being loaded stays until the load has ended", CacheTier.load)
            tier.settled(self.transfer(mine), store=False, ok=True)
            tier.check_integrity()
