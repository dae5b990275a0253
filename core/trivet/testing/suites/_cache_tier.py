"""A cache tier in a dictionary, with bad luck: it refuses, forgets, and its transfers fail wholly or in part."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trivet.plan import Transfer
from trivet.roles import CacheTier, TierLoad, TierStore
from trivet.testing.suites._base import require
from trivet.testing.suites._cache_names import Cell


class NaiveTier(CacheTier):
    """Keeps cells by key, the latest ``capacity`` of them. All decisions are drawn from ``seed``."""

    def __init__(self, endpoint: str, capacity: int, seed: int) -> None:
        self.endpoint, self._capacity, self._rng = endpoint, capacity, random.Random(seed)
        #: by key, the oldest first; None until the store that brings it is carried out
        self.content: dict[bytes, list[Cell] | None] = {}
        self._pinned: dict[bytes, int] = {}

    def holds(self, key: bytes) -> bool:
        """See :meth:`CacheTier.holds`."""
        return key in self.content

    def store(self, keys: Sequence[bytes]) -> TierStore:
        """Takes most of what it is offered."""
        taken = []
        for key in keys:
            require(key and key not in self.content, "a tier is offered what it lacks", CacheTier.store, key=key)
            room = self._make_room() and self._rng.random() < 0.9
            if room:
                self.content[key] = None
            taken.append(room)
        return TierStore(taken)

    def _make_room(self) -> bool:
        while len(self.content) >= self._capacity:
            # What is on its way in is named by a transfer that has not been sent yet.
            oldest = next((k for k, cells in self.content.items() if cells and not self._pinned.get(k)), None)
            if oldest is None:
                return False
            del self.content[oldest]
        return True

    def load(self, keys: Sequence[bytes]) -> TierLoad:
        """Keeps what is wanted."""
        for key in keys:
            require(key in self.content, "only what a tier holds is loaded", CacheTier.load, key=key)
            self._pinned[key] = self._pinned.get(key, 0) + 1
        return TierLoad(blocking=self._rng.random() < 0.4)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Moves them to the end."""
        for key in keys:
            require(key in self.content, "only what a tier holds is touched", CacheTier.touch, key=key)
            self.content[key] = self.content.pop(key)

    def settled(self, transfer: Transfer, *, store: bool, ok: bool) -> None:
        """A failed store brought nothing; a load no longer needs its keys."""
        for key in filter(None, transfer.keys):
            if not store:
                self._pinned[key] -= 1
                if not self._pinned[key]:
                    del self._pinned[key]
            elif not ok:
                self.forget([key])

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drops them."""
        for key in keys:
            self.content.pop(key, None)

    def reset(self) -> None:
        """Drops everything."""
        require(not self._pinned, "a tier is reset when nothing is being loaded", CacheTier.reset)
        self.content.clear()
