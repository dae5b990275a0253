"""Places for blocks in one kind of memory: which key is where, which places are in use by transfers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from trivet_offload.policies import TierPolicy


class SlotSpace:
    """``capacity`` places, numbered from 0, and the policy that says whose place is given away.

    A pinned place is read or written by a transfer under way: it is not given to others before it is unpinned, even if
    its content is forgotten in the meantime."""

    def __init__(self, capacity: int, policy: TierPolicy) -> None:
        self.capacity, self._policy = capacity, policy
        self._slots: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}
        self._pinned: set[bytes] = set()
        #: places that nobody has any more; those from ``_fresh`` on were never used, and their memory is untouched
        self._free: list[int] = []
        self._fresh = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def slot(self, key: bytes) -> int:
        """Where ``key``, which is there, is."""
        return self._slots[key]

    def key(self, slot: int) -> bytes | None:
        """Whose place it is."""
        return self._keys.get(slot)

    def use(self, key: bytes) -> None:
        """``key``, which is there, was used."""
        self._policy.use(key)

    def take(self, key: bytes) -> tuple[int, bytes | None] | None:
        """A place for ``key``, which is not there, and the key that had to go for it, if any. None if all places are
        pinned."""
        if self._free or self._fresh < self.capacity:
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._fresh = self._fresh, self._fresh + 1
            self._policy.admit(key, full=False, pinned=())
            victim = None
        elif len(self._pinned) < len(self._slots):
            victim = self._policy.admit(key, full=True, pinned=self._pinned)
            assert victim is not None, "the policy named no victim"
            assert victim not in self._pinned, "the policy's victim is in use"
            slot = self._slots.pop(victim)
        else:
            return None
        self._slots[key], self._keys[slot] = slot, key
        return slot, victim

    def place(self, content: Mapping[int, bytes]) -> None:
        """At the start: what is there already, by place, the least recently used first."""
        for slot, key in content.items():
            self._policy.admit(key, full=False, pinned=())
            self._slots[key], self._keys[slot] = slot, key
        self._fresh = max(content, default=-1) + 1
        self._free = [slot for slot in reversed(range(self._fresh)) if slot not in content]

    def pin(self, key: bytes) -> int:
        """Keep the place of ``key`` from reuse until :meth:`unpin`; returns it."""
        slot = self._slots[key]
        self._pins[slot] = self._pins.get(slot, 0) + 1
        self._pinned.add(key)
        return slot

    def unpin(self, slots: Iterable[int]) -> None:
        """End a pin of each of the places."""
        for slot in slots:
            count = self._pins.pop(slot) - 1
            if count:
                self._pins[slot] = count
                continue
            key = self._keys.get(slot)
            if key is None:
                self._free.append(slot)
            else:
                self._pinned.discard(key)

    def drop(self, key: bytes) -> bool:
        """Forget ``key``; False if it is not there."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return False
        del self._keys[slot]
        self._policy.remove(key)
        self._pinned.discard(key)
        if slot not in self._pins:
            self._free.append(slot)
        return True

    def clear(self) -> None:
        """Forget everything, pins included."""
        for content in (self._slots, self._keys, self._pins, self._pinned):
            content.clear()
        self._policy.clear()
        self._free = list(reversed(range(self._fresh)))

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def pins(self) -> list[int]:
        """Pinned places in ascending order, as often as they are pinned."""
        return sorted(slot for slot, count in self._pins.items() for _ in range(count))

    def check_integrity(self) -> None:
        """Every place is free, has one key, or waits for its transfer to end."""
        assert {slot: key for key, slot in self._slots.items()} == self._keys, "keys and places disagree"
        assert len(self._policy) == len(self._slots), "the policy counts other keys"
        assert all(key in self._policy for key in self._slots), "the policy does not know a key"
        waiting = {slot for slot in self._pins if slot not in self._keys}
        assert self._pinned == {self._keys[slot] for slot in self._pins if slot in self._keys}, "pins disagree"
        places = [*self._free, *self._keys, *waiting]
        assert sorted(places) == list(range(self._fresh)), "places are lost or given twice"
        assert self._fresh <= self.capacity
        self._policy.check_integrity()
