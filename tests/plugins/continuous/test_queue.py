"""The waiting queue against a sorted list, for policies of every kind."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.policies import SchedulingPolicy
from trivet.state import Request
from trivet_continuous.policies import Fcfs, Priority, ShortestFirst
from trivet_continuous.queue import WaitingQueue
from trivet_schemas.sampling import SamplingParams


def make(index: int, length: int = 3, **fields: Any) -> Request:
    prompt = np.zeros(length, np.int32)
    return Request(str(index), prompt, SamplingParams(), length + 4, 0, index=index, **fields)


class Grouped(SchedulingPolicy):
    """Groups by priority modulo 3, whose ranks the test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = {0: 0.0, 1: 0.0, 2: 0.0}
        self.waiting = 0

    def key(self, request: Request) -> Any:
        return request.num_prompt

    def group(self, request: Request) -> Hashable:
        return request.priority % 3

    def rank(self, group: Hashable) -> Any:
        return self.ranks[group]  # type: ignore[index]

    def queued(self, request: Request) -> None:
        self.waiting += 1

    def removed(self, request: Request) -> None:
        self.waiting -= 1

    def admitted(self, request: Request) -> None:
        self.waiting -= 1


class Reference:
    """All members in a list, sorted anew whenever somebody asks."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.members: list[Request] = []
        self.parked: set[str] = set()
        self.passing: set[str] = set()

    def head(self) -> Request | None:
        policy = self.policy
        ready = [r for r in self.members if r.request_id not in self.parked]
        groups: dict[Hashable, list[Request]] = {}
        for request in ready:
            groups.setdefault(policy.group(request), []).append(request)
        first = [
            (policy.rank(name), min(members, key=lambda r: (policy.key(r), r.index)))
            for name, members in groups.items()
        ]
        return min(first, key=lambda pair: (pair[0], pair[1].index))[1] if first else None


@pytest.mark.parametrize(
    "policy", [Fcfs, Priority, lambda: ShortestFirst(ageing=2), Grouped], ids=["fcfs", "priority", "shortest", "groups"]
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), operations=st.lists(st.integers(0, 7), max_size=120))
def test_every_order_of_operations_agrees_with_a_sorted_list(policy: Any, seed: int, operations: list[int]) -> None:
    rng = random.Random(seed)
    made = policy()
    queue, reference = WaitingQueue(made), Reference(made)
    index = 0
    for operation in operations:
        head = queue.head()
        assert head is reference.head()
        if operation <= 2:
            fields = {"priority": rng.randrange(4), "arrival_time": float(rng.randrange(5))}
            request = make(index, rng.randint(1, 6), num_preemptions=rng.choice([0, 0, 1]), **fields)
            index += 1
            queue.push(request)
            reference.members.append(request)
        elif operation == 3 and head is not None:
            queue.pop(head)
            reference.members.remove(head)
        elif operation == 4 and head is not None:
            passing = rng.random() < 0.5
            queue.park(head, passing=passing)
            reference.parked.add(head.request_id)
            if passing:
                reference.passing.add(head.request_id)
        elif operation == 5 and reference.members:
            request = rng.choice(reference.members)
            queue.remove(request)
            queue.remove(request)
            reference.members.remove(request)
        elif operation == 6 and reference.members:
            request = rng.choice(reference.members)
            queue.unpark(request)
            reference.parked.discard(request.request_id)
        elif operation == 7:
            queue.unpark_passing()
            reference.parked -= reference.passing
            reference.passing.clear()
            if isinstance(made, Grouped):
                made.ranks[rng.randrange(3)] = rng.choice([0.0, 1.0, 2.0])
        reference.parked &= {request.request_id for request in reference.members}
        queue.check_integrity()
        assert len(queue) == len(reference.members)
        assert {request.index for request in queue} == {request.index for request in reference.members}
        if isinstance(made, Grouped):
            assert made.waiting == len(queue)


@pytest.mark.parametrize("policy", [Fcfs, Grouped])
def test_the_number_ahead_is_that_of_requests_which_leave_before(policy: Any) -> None:
    rng = random.Random(4)
    queue = WaitingQueue(policy())
    if isinstance(queue._policy, Grouped):
        queue._policy.ranks = {0: 2.0, 1: 0.0, 2: 1.0}
    for index in range(30):
        queue.push(make(index, rng.randint(1, 6), priority=rng.randrange(4)))
    expected = {request.index: queue.ahead(request) for request in queue}
    for position in range(30):
        head = queue.head()
        assert head is not None
        assert expected[head.index] == position
        queue.pop(head)


def test_removed_requests_do_not_pile_up() -> None:
    queue = WaitingQueue(Fcfs())
    first = make(0)
    queue.push(first)
    for index in range(1, 1000):
        request = make(index)
        queue.push(request)
        queue.remove(request)
    (group,) = queue._groups.values()
    assert len(group._heap) < 100
    assert queue.head() is first


@pytest.mark.parametrize("grouped", [False, True])
def test_a_request_whose_key_cannot_be_compared_leaves_the_queue_as_it_was(grouped: bool) -> None:
    class Odd(Grouped):
        def key(self, request: Request) -> Any:
            if request.num_prompt == 9:
                raise KeyError("no key")
            return str(request.num_prompt) if request.num_prompt == 8 else request.num_prompt

    policy = Odd()
    queue = WaitingQueue(policy)
    good = [make(i, 1 + i % 6, priority=i if grouped else 0) for i in range(12)]
    for request in good:
        queue.push(request)
        for length, error in ((8, TypeError), (9, KeyError)):
            with pytest.raises(error):
                queue.push(make(100, length, priority=request.priority))
            queue.check_integrity()
    assert (len(queue), policy.waiting) == (12, 12)
    while (head := queue.head()) is not None:
        queue.pop(head)
    assert policy.waiting == 0
    with pytest.raises(KeyError):
        queue.push(make(100, 9))
    queue.check_integrity()
    assert queue.head() is None
