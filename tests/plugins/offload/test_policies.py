"""The tier's policies against slow models of themselves."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet_offload.policies import ArcPolicy, LruPolicy, TierPolicy


def key(number: int) -> bytes:
    return b"%d" % number


def request(policy: TierPolicy, wanted: bytes, capacity: int, pinned: Container[bytes] = ()) -> bytes | None:
    """What a cache does that is asked for a key; returns what had to go."""
    if wanted in policy:
        policy.use(wanted)
        return None
    return policy.admit(wanted, full=len(policy) == capacity, pinned=pinned)


class PaperArc:
    """Figure 4 of the paper, with lists whose last entry is the most recently used."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def request(self, x: bytes) -> bytes | None:
        for resident in (self.t1, self.t2):
            if x in resident:
                resident.remove(x)
                self.t2.append(x)
                return None
        gone = None
        if x in self.b1:
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1), self.c)
            gone = self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
            return gone
        if x in self.b2:
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1), 0)
            gone = self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
            return gone
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                gone = self.replace(x)
            else:
                gone = self.t1.pop(0)
        else:
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if total >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                gone = self.replace(x)
        self.t1.append(x)
        return gone

    def replace(self, x: bytes) -> bytes:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            gone = self.t1.pop(0)
            self.b1.append(gone)
        else:
            gone = self.t2.pop(0)
            self.b2.append(gone)
        return gone


@given(st.integers(1, 6), st.lists(st.integers(0, 14), max_size=120))
def test_arc_does_what_the_paper_says(capacity: int, wanted: list[int]) -> None:
    arc, paper = ArcPolicy(capacity), PaperArc(capacity)
    for number in wanted:
        assert request(arc, key(number), capacity) == paper.request(key(number))
        assert arc.lists() == (paper.t1, paper.t2, paper.b1, paper.b2)
        assert arc.target == paper.p
        arc.check_integrity()


@given(st.integers(1, 6), st.lists(st.integers(0, 14), max_size=120))
def test_lru_gives_up_what_was_not_used_for_longest(capacity: int, wanted: list[int]) -> None:
    lru = LruPolicy(capacity)
    order: list[bytes] = []
    for number in wanted:
        gone = request(lru, key(number), capacity)
        if key(number) in order:
            order.remove(key(number))
        expected = order.pop(0) if len(order) == capacity else None
        assert gone == expected
        order.append(key(number))


Step = tuple[str, int, set[int]]
steps = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "lose"]), st.integers(0, 11), st.sets(st.integers(0, 11))),
    max_size=150,
)


@pytest.mark.parametrize("kind", [LruPolicy, ArcPolicy])
@given(capacity=st.integers(1, 6), work=steps)
def test_pinned_keys_stay_and_lost_ones_leave(kind: Any, capacity: int, work: list[Step]) -> None:
    policy: TierPolicy = kind(capacity)
    there: set[bytes] = set()
    for what, number, pins in work:
        wanted, pinned = key(number), {key(pin) for pin in pins}
        if what == "lose":
            if wanted in there:
                policy.remove(wanted)
                there.remove(wanted)
        elif wanted in there or len(there) < capacity or there - pinned:
            gone = request(policy, wanted, capacity, pinned)
            assert (gone is not None) == (wanted not in there and len(there) == capacity)
            assert gone not in pinned
            there = (there | {wanted}) - {gone} if gone else there | {wanted}
        assert len(policy) == len(there)
        assert all(one in policy for one in there)
        policy.check_integrity()
    policy.clear()
    assert len(policy) == 0


def test_arc_keeps_what_is_used_often_through_a_scan() -> None:
    capacity = 8
    arc, lru = ArcPolicy(capacity), LruPolicy(capacity)
    often = [key(number) for number in range(4)]
    for policy in (arc, lru):
        for _ in range(3):
            for one in often:
                request(policy, one, capacity)
        for number in range(100, 200):
            request(policy, key(number), capacity)
    assert all(one in arc for one in often)
    assert not any(one in lru for one in often)


def test_a_key_that_comes_again_while_it_is_remembered_moves_the_target() -> None:
    arc = ArcPolicy(2)
    for number in (0, 1):
        request(arc, key(number), 2)
    arc.use(key(0))  # T1: 1, T2: 0
    request(arc, key(2), 2)  # 1 goes, and is remembered
    assert arc.lists() == ([key(2)], [key(0)], [key(1)], [])
    assert arc.target == 0
    assert request(arc, key(1), 2) == key(0)
    assert arc.target == 1
    assert arc.lists() == ([key(2)], [key(1)], [], [key(0)])
    request(arc, key(0), 2)
    assert arc.target == 0
