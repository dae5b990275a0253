"""Work that every engine runs unchanged: lists of (prompt token ids, tokens to generate), from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

Work = list[tuple[list[int], int]]

_FIRST, _LAST = 100, 150_000


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(_FIRST, _LAST) for _ in range(length)]


def mixed(seed: int) -> Work:
    """32 requests, prompts of 32 to 512 tokens, 32 to 128 tokens out: a chat-like mix."""
    rng = random.Random(seed)
    return [(_prompt(rng, rng.randint(32, 512)), rng.randint(32, 128)) for _ in range(32)]


def single(seed: int) -> Work:
    """One stream, 64 tokens in, 64 out: latency."""
    return [(_prompt(random.Random(seed), 64), 64)]


def decode(seed: int) -> Work:
    """64 requests of 16 tokens, 96 out: a large batch that decodes."""
    rng = random.Random(seed)
    return [(_prompt(rng, 16), 96) for _ in range(64)]


def long(seed: int) -> Work:
    """4 requests of 1,056 tokens, 16 out: prompts."""
    rng = random.Random(seed)
    return [(_prompt(rng, 1056), 16) for _ in range(4)]


def prefix(seed: int) -> Work:
    """16 requests that share their first 1,024 tokens, 32 of their own, 16 out: what prefix caching is for."""
    rng = random.Random(seed)
    shared = _prompt(rng, 1024)
    return [(shared + _prompt(rng, 32), 16) for _ in range(16)]


def sessions(seed: int, count: int, length: int, turns: int, turn: int) -> list[list[list[int]]]:
    """Per session, ``length`` tokens to begin with and then ``turns`` times ``turn`` new ones."""
    rng = random.Random(seed)
    return [[_prompt(rng, length), *(_prompt(rng, turn) for _ in range(turns))] for _ in range(count)]


WORKLOADS: dict[str, Callable[[int], Work]] = {
    "mixed": mixed,
    "single": single,
    "decode": decode,
    "long": long,
    "prefix": prefix,
}
