"""Work whose prompts begin alike, and an engine that runs it round by round."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import kit

from trivet.engine import Engine
from trivet.state import Request
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.sampling import SamplingParams

Work = list[tuple[list[int], int]]

PREFIXES = (5, 8, 15, 16, 17, 24, 32, 33)
TAILS = (0, 1, 8, 9)
TWINS = (16, 32, 40)  #: lengths of prompts that come twice


def make_groups(seed: int) -> Work:
    """Groups of prompts with a common beginning, which is itself a prompt of the group, and prompts that come twice."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(kit.VOCAB) for _ in range(count)]

    prompts = [shared + ids(tail) for shared in map(ids, PREFIXES) for tail in TAILS]
    prompts += [twin for twin in map(ids, TWINS) for _ in range(2)]
    rng.shuffle(prompts)
    return [(prompt, rng.choice([1, 2, 5, 9, 12])) for prompt in prompts]


def make_turns(work: Work, outputs: Sequence[Sequence[int]], seed: int) -> Work:
    """The next turn of every second request of ``work``: prompt, output and a few new tokens."""
    rng = random.Random(seed)
    turns = []
    for (prompt, _), output in list(zip(work, outputs, strict=True))[::2]:
        longer = [*prompt, *output, *(rng.randrange(kit.VOCAB) for _ in range(rng.randint(1, 8)))]
        turns.append((longer, min(rng.choice([1, 2, 4, 8]), kit.LONGEST - len(longer))))
    return turns


@dataclass(frozen=True, slots=True)
class Round:
    """Work with what transformers makes of it."""

    work: Work
    want: list[list[int]]
    gaps: list[list[float]]


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a round: its requests in order, and how much the cache's statistics grew."""

    requests: list[Request]
    prefix_hits: int
    tier_hits: int
    evicted: int

    @property
    def outputs(self) -> list[list[int]]:
        """Tokens of each request."""
        return [request.output_ids for request in self.requests]

    @property
    def cached(self) -> list[int]:
        """Tokens that each request found at its first admission."""
        return [request.num_cached_tokens for request in self.requests]


class Session:
    """An engine; used as a context manager, which looks at the end that no block is in use."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.engine = Engine(settings, [FakeTokenizer()])
        self.cache = self.engine.parts.cache
        self._count = 0

    def run(self, work: Work, params: Sequence[SamplingParams] = (), parents: Sequence[int | None] = ()) -> Ran:
        """Run requests together, greedily unless ``params`` say otherwise; ``parents[i]`` is the request whose prompt
        request ``i`` shares, by its place in ``work``."""
        first, before = self._count, self.cache.stats()
        for i, (prompt, count) in enumerate(work):
            one = params[i] if params else SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            parent = parents[i] if parents else None
            name = None if parent is None else str(first + parent)
            self.engine.add_request(str(self._count), prompt, one, parent=name)
            self._count += 1
        done: dict[int, Request] = {}
        while self.engine.has_work:
            for end in self.engine.step().finished:
                assert end.message is None, end.message
                done[int(end.request.request_id) - first] = end.request
        self.settle()
        after = self.cache.stats()
        return Ran(
            [done[i] for i in range(len(work))],
            after.prefix_hits - before.prefix_hits,
            after.tier_hits - before.tier_hits,
            after.evicted - before.evicted,
        )

    def check(self, round_: Round) -> Ran:
        """Run a round and compare it with the reference: any difference must be a near-tie."""
        ran = self.run(round_.work)
        assert not kit.differences(ran.outputs, round_.want, round_.gaps)
        assert kit.ties(ran.outputs, round_.want) <= 1, "a near-tie happens at most once in 1e5 tokens"
        return ran

    def settle(self) -> None:
        """Nothing is in use, and the books are in order."""
        self.engine.check_integrity()
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.free == stats.total

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.shutdown()


def findable(work: Work, block_size: int) -> list[int]:
    """Tokens of each prompt that full blocks hold once it was computed; the last token is computed in any case."""
    return [(len(prompt) - 1) // block_size * block_size for prompt, _ in work]
