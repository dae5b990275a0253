"""The longest beginning of a request whose content is there, in every KV group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

from trivet.roles import CacheTier
from trivet_paged.groups import Group
from trivet_paged.pool import BlockPool


@dataclass(slots=True)
class Found:
    """``num_tokens`` are covered. ``blocks[g]`` are the table's entries for them: the null block outside the window, -1
    where a tier has the content; ``loads`` are those entries, as (group, index, tier)."""

    num_tokens: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    loads: list[tuple[int, int, CacheTier]] = field(default_factory=list)


def tier_key(group: int, digest: bytes) -> bytes:
    """The name of a block's content to tiers."""
    return digest + bytes([group])


class Lookup:
    """Finds content in the pool first, then in the tiers in their order."""

    def __init__(self, groups: Sequence[Group], pool: BlockPool, tiers: Sequence[CacheTier]) -> None:
        self._groups, self._pool, self._tiers = groups, pool, tiers
        #: groups that need everything first: they set the bound that the windows are looked at below
        self._order = sorted(groups, key=lambda group: group.windowed)
        self._step = lcm(*(group.factor for group in groups))
        self._base = min(group.size // group.factor for group in groups)

    def longest(self, chain: Sequence[bytes], most_tokens: int) -> Found:
        """What is there for the request with these digests, at most ``most_tokens`` tokens of it."""
        # All lengths here are in blocks of the smallest size, and multiples of every block.
        length = min(len(chain), most_tokens // self._base) // self._step * self._step
        while length:
            best = length
            for group in self._order:
                best = self._best(group, chain, best)
            if best == length:
                break
            length = best
        return self._collect(chain, length) if length else Found(0, [[] for _ in self._groups])

    def _best(self, group: Group, chain: Sequence[bytes], length: int) -> int:
        """The longest beginning up to ``length`` that this group has what it needs of."""
        if not group.windowed:
            count = length // group.factor
            for i in range(count):
                if not self._has(group, chain, i):
                    return i * group.factor // self._step * self._step
            return length
        while length:
            missing = self._missing(group, chain, length)
            if missing is None:
                return length
            # Nothing longer than what lies before the gap can do, unless the window moves past the gap.
            length = self._before(group, missing, length)
        return 0

    def _missing(self, group: Group, chain: Sequence[bytes], length: int) -> int | None:
        """The last block within the window that is not there."""
        first = group.first_block(length * self._base)
        for i in range(length // group.factor - 1, first - 1, -1):
            if not self._has(group, chain, i):
                return i
        return None

    def _before(self, group: Group, missing: int, length: int) -> int:
        """The next shorter beginning whose window does not hold the block that is missing."""
        shorter = missing * group.factor // self._step * self._step
        if group.kv.kind == "chunked":
            # A window that begins anew at a multiple may lie wholly behind the gap.
            for candidate in range(length - self._step, shorter, -self._step):
                if group.first_block(candidate * self._base) > missing:
                    return candidate
        return shorter

    def _has(self, group: Group, chain: Sequence[bytes], index: int) -> bool:
        digest = chain[(index + 1) * group.factor - 1]
        if digest in self._pool.index[group.index]:
            return True
        return bool(self._tiers) and any(tier.holds(tier_key(group.index, digest)) for tier in self._tiers)

    def _collect(self, chain: Sequence[bytes], length: int) -> Found:
        found = Found(length * self._base)
        for group in self._groups:
            first, index = group.first_block(found.num_tokens), self._pool.index[group.index]
            entries = [0] * first
            for i in range(first, length // group.factor):
                digest = chain[(i + 1) * group.factor - 1]
                block = index.get(digest, -1)
                if block < 0:
                    key = tier_key(group.index, digest)
                    found.loads.append((group.index, i, next(tier for tier in self._tiers if tier.holds(key))))
                entries.append(block)
            found.blocks.append(entries)
        return found
