"""Traffic between the pool and the cache tiers: stores of what is evicted, loads of what is found again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import lcm

import numpy as np

from trivet.plan import Int32, Transfer
from trivet.roles import CacheTier, TierLoad
from trivet_paged.groups import Group
from trivet_paged.lookup import Found, tier_key


@dataclass(slots=True)
class _Load:
    """A load under way: which of its blocks hold what once it has ended."""

    tier: CacheTier
    transfer: Transfer
    #: (group, digest, block)
    content: list[tuple[int, bytes, int]]


class TierTraffic:
    """Decides with the tiers what moves, and makes the transfers."""

    def __init__(self, tiers: Sequence[CacheTier], groups: Sequence[Group]) -> None:
        self._tiers, self._groups = tiers, groups
        self._align = lcm(*(group.size for group in groups))
        self._queued: list[Transfer] = []
        self._persisting: Iterator[tuple[int, bytes, int]] | None = None
        self._stores: dict[int, tuple[CacheTier, Transfer]] = {}  # by the transfer's identity
        self._loads: dict[int, _Load] = {}
        #: block → (tier, key) of loads under way
        self._filling: dict[int, tuple[CacheTier, bytes]] = {}

    # ------------------------------------------------------------------ out

    def offer(self, evicted: Sequence[tuple[int, bytes, int]], tiers: Sequence[CacheTier] | None = None) -> None:
        """Blocks (group, digest, block) are about to be written by others. The first tier that wants one takes it, by a
        store that reads it before the next step writes anything."""
        keyed = [(group, tier_key(group, digest), block) for group, digest, block in evicted]
        for tier in self._tiers if tiers is None else tiers:
            if known := [key for _, key, _ in keyed if tier.holds(key)]:
                tier.touch(known)
                keyed = [entry for entry in keyed if not tier.holds(entry[1])]
            if not keyed:
                return
            # Keys go group after group, as the blocks do.
            keyed.sort(key=lambda entry: entry[0])
            choice = tier.store([key for _, key, _ in keyed])
            chosen = [entry for entry, taken in zip(keyed, choice.taken, strict=True) if taken]
            keyed = [entry for entry, taken in zip(keyed, choice.taken, strict=True) if not taken]
            if chosen:
                blocks = [np.array([b for g, _, b in chosen if g == group.index], np.int32) for group in self._groups]
                keys = [key for _, key, _ in chosen]
                store = Transfer(-1, tier.endpoint, -1, -1, 0, 0, blocks, keys, blocking=True, payload=choice.payload)
                self._queued.append(store)
                self._stores[id(store)] = tier, store

    def persist(self, content: Iterable[tuple[int, bytes, int]], limit: int) -> bool:
        """Offer ``limit`` further blocks of ``content``, which stay where they are, to tiers that outlive the process;
        False when there is nothing left that they take."""
        tiers = [tier for tier in self._tiers if tier.persists]
        if self._persisting is None:
            # No more than they hold, or what came first would make room for what came last.
            room = sum(tier.stats().capacity for tier in tiers)
            missing = (one for one in content if not any(tier.holds(tier_key(*one[:2])) for tier in tiers))
            self._persisting = islice(missing, room)
        queued = len(self._queued)
        self.offer(list(islice(self._persisting, limit)), tiers)
        return len(self._queued) > queued

    def take_stores(self) -> list[Transfer]:
        """Stores for the next plan, once."""
        queued, self._queued = self._queued, []
        return queued

    # ------------------------------------------------------------------ in

    def claim(self, found: Found, chain: Sequence[bytes]) -> list[tuple[CacheTier, TierLoad]]:
        """Tell each tier what will be loaded from it, group after group and in the order of the blocks."""
        keys: dict[int, tuple[CacheTier, list[bytes]]] = {}
        for group, index, tier in found.loads:
            digest = chain[(index + 1) * self._groups[group].factor - 1]
            keys.setdefault(id(tier), (tier, []))[1].append(tier_key(group, digest))
        return [(tier, tier.load(wanted)) for tier, wanted in keys.values()]

    def load(
        self,
        slot: int,
        epoch: int,
        found: Found,
        claims: Sequence[tuple[CacheTier, TierLoad]],
        chain: Sequence[bytes],
    ) -> list[Transfer]:
        """Transfers for what was claimed, one per tier, into the blocks that ``found`` names by now."""
        first = min(index * self._groups[group].size for group, index, _ in found.loads)
        start = first // self._align * self._align
        transfers: list[Transfer] = []
        for tier, how in claims:
            mine = {(group, index) for group, index, owner in found.loads if owner is tier}
            blocks: list[Int32] = []
            keys: list[bytes] = []
            content: list[tuple[int, bytes, int]] = []
            for group in self._groups:
                places = range(start // group.size, found.num_tokens // group.size)
                row = np.zeros(len(places), np.int32)
                for at, index in enumerate(places):
                    if (group.index, index) not in mine:
                        keys.append(b"")
                        continue
                    digest, block = chain[(index + 1) * group.factor - 1], found.blocks[group.index][index]
                    row[at] = block
                    keys.append(tier_key(group.index, digest))
                    content.append((group.index, digest, block))
                    self._filling[block] = tier, keys[-1]
                blocks.append(row)
            count = found.num_tokens - start
            transfer = Transfer(
                -1, tier.endpoint, slot, epoch, start, count, blocks, keys, how.blocking, payload=how.payload
            )
            self._loads[id(transfer)] = _Load(tier, transfer, content)
            transfers.append(transfer)
        return transfers

    def withdraw(self, slot: int) -> None:
        """A request did not get in after all: its loads will not be sent."""
        unsent = [load for load in self._loads.values() if load.transfer.slot == slot and load.transfer.transfer_id < 0]
        for load in unsent:
            self.ended(load.transfer, ok=False)

    def is_loading(self, slot: int, epoch: int) -> bool:
        """Whether loads of an admission are under way."""
        return any((load.transfer.slot, load.transfer.epoch) == (slot, epoch) for load in self._loads.values())

    def damaged(self, blocks: Iterable[int]) -> None:
        """What was loaded into these blocks is no good: the tiers must not offer it again."""
        for block in blocks:
            entry = self._filling.pop(block, None)
            if entry is not None:
                tier, key = entry
                tier.forget([key])

    def ended(self, transfer: Transfer, *, ok: bool) -> list[tuple[int, bytes, int]]:
        """A transfer ended; returns what its blocks hold now, as (group, digest, block): all but the damaged ones. The
        request of a failed load is admitted anew, so nobody writes to them."""
        if (store := self._stores.pop(id(transfer), None)) is not None:
            store[0].settled(transfer, store=True, ok=ok)
            return []
        load = self._loads.pop(id(transfer), None)
        if load is None:
            return []
        good = [(group, digest, block) for group, digest, block in load.content if block in self._filling]
        for _, _, block in good:
            del self._filling[block]
        load.tier.settled(transfer, store=False, ok=ok)
        if not ok and len(good) == len(load.content):
            # Nobody said which part is damaged. What was never sent was never read, and may be good.
            if transfer.transfer_id >= 0:
                load.tier.forget([key for key in transfer.keys if key])
            return []
        return good

    def reset(self) -> None:
        """Forget everything that is stored."""
        for tier in self._tiers:
            tier.reset()

    def check_integrity(self) -> None:
        """Blocks that are being filled belong to loads under way."""
        under_way = {block for load in self._loads.values() for _, _, block in load.content}
        assert under_way.issuperset(self._filling), "a block is being filled by no load"
        for tier in self._tiers:
            tier.check_integrity()
