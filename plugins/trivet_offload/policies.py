"""Policies of a tier: which content goes when there is no room. Components of the kind ``tier_policy``.

A factory is called with ``capacity``, the number of blocks that there is room for, and returns a :class:`TierPolicy`.
All operations of the policies here are O(1), apart from passing over blocks that cannot go at present."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterable


class TierPolicy(ABC):
    """Keeps account of the keys that are there. Keys are opaque."""

    @abstractmethod
    def admit(self, key: bytes, *, full: bool, pinned: Container[bytes]) -> bytes | None:
        """Take in ``key``, which is not there. If there is no room (``full``), a key that is not ``pinned`` has to go,
        and is returned; the caller sees to it that there is one."""

    @abstractmethod
    def use(self, key: bytes) -> None:
        """``key``, which is there, was used."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """``key``, which is there, is lost; it was not the policy's choice."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, also what is remembered of keys that are gone."""

    @abstractmethod
    def __len__(self) -> int:
        """Keys that are there."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether the key is there."""

    def check_integrity(self) -> None:
        """Raise AssertionError when the state contradicts itself."""


class LruPolicy(TierPolicy):
    """The least recently used goes."""

    def __init__(self, capacity: int) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, key: bytes, *, full: bool, pinned: Container[bytes]) -> bytes | None:
        victim = _oldest(self._keys, pinned) if full else None
        if victim is not None:
            del self._keys[victim]
        self._keys[key] = None
        return victim

    def use(self, key: bytes) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def clear(self) -> None:
        self._keys.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys


class ArcPolicy(TierPolicy):
    """Adaptive Replacement Cache (Megiddo & Modha, FAST 2003).

    ``T1`` has keys that were seen once lately, ``T2`` those seen more often; ``B1`` and ``B2`` remember keys that were
    given up from each. A key that comes again while it is remembered moves the target size of ``T1`` in favour of the
    list that it had to leave. Names are the paper's.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._p = 0.0
        self._t1: OrderedDict[bytes, None] = OrderedDict()
        self._t2: OrderedDict[bytes, None] = OrderedDict()
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()

    @property
    def target(self) -> float:
        """The size that ``T1`` should have."""
        return self._p

    def lists(self) -> tuple[list[bytes], list[bytes], list[bytes], list[bytes]]:
        """``T1``, ``T2``, ``B1``, ``B2``, each from the least to the most recently used."""
        return list(self._t1), list(self._t2), list(self._b1), list(self._b2)

    def admit(self, key: bytes, *, full: bool, pinned: Container[bytes]) -> bytes | None:
        b1, b2 = self._b1, self._b2
        in_b1, in_b2 = key in b1, key in b2
        if in_b1:
            self._p = min(self._p + max(len(b2) / len(b1), 1.0), float(self._capacity))
        elif in_b2:
            self._p = max(self._p - max(len(b1) / len(b2), 1.0), 0.0)
        victim = self._replace(in_b2=in_b2, pinned=pinned) if full else None
        if in_b1 or in_b2:
            del (b1 if in_b1 else b2)[key]
            self._t2[key] = None
        else:
            self._t1[key] = None
        self._trim()
        return victim

    def _replace(self, *, in_b2: bool, pinned: Container[bytes]) -> bytes | None:
        t1, t2 = self._t1, self._t2
        from_t1 = bool(t1) and (len(t1) > self._p or (in_b2 and len(t1) == self._p))
        sources = ((t1, self._b1), (t2, self._b2))
        for keys, ghosts in sources if from_t1 else reversed(sources):
            victim = _oldest(keys, pinned)
            if victim is not None:
                del keys[victim]
                ghosts[victim] = None
                return victim
        return None

    def _trim(self) -> None:
        """Keep the paper's bounds: ``T1`` and ``B1`` together at most the capacity, all four at most twice that."""
        while self._b1 and len(self._t1) + len(self._b1) > self._capacity:
            self._b1.popitem(last=False)
        while self._b2 and sum(map(len, (self._t1, self._t2, self._b1, self._b2))) > 2 * self._capacity:
            self._b2.popitem(last=False)

    def use(self, key: bytes) -> None:
        if key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        else:
            self._t2.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del (self._t1 if key in self._t1 else self._t2)[key]

    def clear(self) -> None:
        self._p = 0.0
        for keys in (self._t1, self._t2, self._b1, self._b2):
            keys.clear()

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    def check_integrity(self) -> None:
        t1, t2, b1, b2 = (set(keys) for keys in (self._t1, self._t2, self._b1, self._b2))
        assert len(t1 | t2 | b1 | b2) == len(t1) + len(t2) + len(b1) + len(b2), "a key is in two lists"
        assert len(t1) + len(t2) <= self._capacity, "more keys than there is room for"
        assert len(t1) + len(b1) <= self._capacity, "too much is remembered"
        assert len(t1) + len(t2) + len(b1) + len(b2) <= 2 * self._capacity, "too much is remembered"
        assert 0 <= self._p <= self._capacity, "the target is out of range"


def _oldest(keys: Iterable[bytes], pinned: Container[bytes]) -> bytes | None:
    return next((key for key in keys if key not in pinned), None)
