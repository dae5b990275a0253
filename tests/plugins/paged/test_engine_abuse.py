"""Everything at once: requests with common beginnings, salts, adapters, children, logprobs of prompts, while others are
aborted, stopped, held and preempted and the cache is reset, with several steps in flight and with tiers.

Whatever happens, tokens are a prefix of the reference's, the books are in order after every step, events replay to what
can be found, and nothing is left once the engine has drained."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import machine_kit
import pytest
from engine_kit import check_free, engine, greedy

from trivet.context import Hold
from trivet.errors import CacheMemoryError
from trivet.hookspecs import hookimpl
from trivet.testing.fake_model import reference_tokens

LONGEST = 60
MODELS: list[tuple[list[int | None], list[bool]]] = [
    ([None], []),
    ([9], []),
    ([None, 9, 9, None], []),
    ([8, None], [True]),
    ([None, 5, 12], []),
]


class Replay:
    """What can be found, as events tell it."""

    def __init__(self) -> None:
        self.found: set[tuple[int, bytes]] = set()

    @hookimpl
    def trivet_blocks_stored(self, event: Any) -> None:
        told = {(event.group, digest) for digest in event.hashes}
        assert not told & self.found, "stored twice"
        self.found |= told

    @hookimpl
    def trivet_blocks_evicted(self, event: Any) -> None:
        told = {(event.group, digest) for digest in event.hashes}
        assert told <= self.found, "evicted what was never stored"
        self.found -= {key for key in self.found if key[0] == event.group} if event.cleared else told


class Life:
    """One engine, drawn from a seed, and what becomes of its requests."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.windows, self.chunked = rng.choice(MODELS)
        self.tier = rng.random() < 0.6
        self.settings: dict[str, Any] = {
            "cache": {"use": "paged", "block_size": rng.choice([1, 2, 3, 4, 7, 16])},
            "scheduler": {
                "use": "continuous",
                "max_num_batched_tokens": rng.choice([3, 8, 200]),
                "max_num_seqs": rng.choice([1, 4, 8]),
            },
            "model": {"use": "fake", "windows": self.windows, "chunked": self.chunked},
        }
        depth = rng.choice([0, 1, 2, 3])
        if depth:
            self.settings["executor"] = {"use": "held", "depth": depth, "mode": rng.choice(["lazy", "eager", "thread"])}
        if self.tier:
            disk = {"path": str(folder), "disk_memory": "64KiB"} if rng.random() < 0.5 else {}
            policy = rng.choice(["lru", "arc"])
            memory = rng.choice([1, 3, 100]) * 4096
            self.settings["cache_tier"] = [{"use": "offload", "host_memory": memory, "policy": policy, **disk}]
        self.slack = rng.choice([0, 2, 10, 100])
        self.stems = [[rng.randrange(64) for _ in range(LONGEST)] for _ in range(3)]
        self.live: dict[str, tuple[list[int], int, str | None]] = {}
        self.held: set[str] = set()
        self.count = 0

    def blocks(self) -> int:
        """The smallest pool that one request fits into, and a little more."""
        for count in range(2, 1000):
            try:
                with engine(machine_kit, **self.sized(count)):
                    return count + self.slack
            except CacheMemoryError:
                continue
        raise AssertionError("no pool is large enough")

    def sized(self, count: int) -> dict[str, Any]:
        return self.settings | {"cache": self.settings["cache"] | {"num_blocks": count}, "max_model_len": LONGEST}

    def add(self, e: Any) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randrange(1, LONGEST - 3)] + [rng.randrange(64)] * rng.choice([0, 0, 2])
        tokens = rng.randint(1, min(LONGEST - len(prompt), rng.choice([2, 8, 30])))
        adapter = rng.choice([None, None, None, "x"])
        tags = {"salt": rng.choice([b"a", b"b"])} if rng.random() < 0.3 else None
        fields = {"prompt_logprobs": 1} if rng.random() < 0.1 else {}
        parent = None
        for child in range(rng.choice([1, 1, 1, 4])):
            name = f"r{self.count}"
            params = greedy(tokens, ignore_eos=True, **({} if child else fields))
            e.add_request(name, prompt, params, parent=parent, adapter=adapter, cache_tags=tags)
            self.live[name] = prompt, tokens, adapter
            self.count += 1
            parent = parent or name

    def disturb(self, e: Any) -> None:
        """One thing that may happen at any time."""
        rng, name = self.rng, self.rng.choice(list(self.live))
        what = rng.choice(["abort", "stop", "reset", "hold", "release", "release", "explain"])
        if what == "abort":
            e.abort([name])
        elif what == "stop" and (outputs := e.context.requests[name].output_ids):
            e.stop(name, rng.randint(1, len(outputs)), "text")
        elif what == "reset":
            e.parts.cache.reset()
        elif what == "hold":
            e.context.hold(name, Hold("test", "abuse", "for a while", 0.0))
            self.held.add(name)
        elif what == "release" and self.held:
            e.context.release(self.held.pop(), "abuse", "test")
        elif what == "explain":
            e.explain(name)

    def ended(self, request: Any) -> None:
        prompt, tokens, adapter = self.live.pop(request.request_id)
        self.held.discard(request.request_id)
        wanted = reference_tokens(prompt, tokens, windows=self.windows, chunked=self.chunked, adapter=adapter)
        assert request.finish_reason in ("length", "stop", "abort"), request.message
        assert request.output_ids == wanted[: len(request.output_ids)]
        assert request.finish_reason != "length" or request.output_ids == wanted

    def run(self) -> None:
        replay, quiet = Replay(), 0
        with engine(machine_kit, replay, **self.sized(self.blocks())) as e:
            cache: Any = e.parts.cache
            while self.count < 25 or e.has_work:
                if self.count < 25 and self.rng.random() < 0.4:
                    self.add(e)
                if self.live and self.rng.random() < 0.15:
                    self.disturb(e)
                ended = e.step().finished
                for end in ended:
                    self.ended(end.request)
                e.check_integrity()
                if self.tier:
                    e.context.all("cache_tier")[0].check_integrity()
                quiet = 0 if ended else quiet + 1
                if quiet > 60 and self.held:
                    e.context.release(self.held.pop(), "abuse", "test")
                assert quiet < 3000, {name: e.explain(name) for name in self.live}
            check_free(e)
            assert not self.live
            # What was evicted for the last plans is told with the next commit.
            e.add_request("last", [1], greedy(1, ignore_eos=True))
            while e.has_work:
                e.step()
            assert replay.found == {(g, digest) for g, index in enumerate(cache._pool.index) for digest in index}
            sharing = cache._sharing
            left = (sharing._leaders, sharing._leads, sharing._ends, sharing._waiting, sharing.loading, cache._chains)
            assert not any(left), "something is kept for requests that have ended"
            assert cache.reset()


@pytest.mark.parametrize("seed", range(8))
def test_a_life(seed: int, tmp_path: Path) -> None:
    Life(seed, tmp_path).run()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 600))
def test_many_lives(seed: int, tmp_path: Path) -> None:
    Life(seed, tmp_path).run()
