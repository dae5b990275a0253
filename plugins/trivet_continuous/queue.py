"""The waiting queue: a heap by policy key for each group of requests, with held requests parked aside."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from trivet.policies import SchedulingPolicy
from trivet.state import Request

_SLACK = 64  # entries of removed requests that the heap may hold beside those of its members


class GroupQueue:
    """Requests in ascending order of ``(key, arrival)``. Removal is lazy: a removed request is skipped when it
    surfaces, and swept out once such entries are the greater part. No operation goes through all members."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self.key = key
        self._heap: list[tuple[Any, int, Request]] = []
        self._parked: dict[str, Request] = {}
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def push(self, request: Request) -> None:
        """Queue a request at the place that its key gives it. Raises what the key raises, also where it cannot be
        compared with the others'; then the request is not queued."""
        entry = self.key(request), request.index, request
        try:
            heapq.heappush(self._heap, entry)
        except Exception:
            self._heap = [other for other in self._heap if other is not entry]
            heapq.heapify(self._heap)
            raise
        self._members[request.request_id] = request

    def remove(self, request: Request) -> bool:
        """Drop a request; False when it is not queued."""
        if self._members.get(request.request_id) is not request:
            return False
        del self._members[request.request_id]
        self._parked.pop(request.request_id, None)
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_queued(entry[2])]
            heapq.heapify(self._heap)
        return True

    def head(self) -> Request | None:
        """The next request that is not parked."""
        while self._heap:
            request = self._heap[0][2]
            if self._is_queued(request):
                return request
            heapq.heappop(self._heap)
        return None

    def _is_queued(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request and request.request_id not in self._parked

    def pop(self, request: Request) -> None:
        """Take a request out that was the head; others may have come back before it in the meantime."""
        self._take(request)
        del self._members[request.request_id]

    def park(self, request: Request) -> None:
        """Set a request aside that was the head, until :meth:`unpark`."""
        self._take(request)
        self._parked[request.request_id] = request

    def _take(self, request: Request) -> None:
        if self._heap[0][2] is request:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[2] is not request]
            heapq.heapify(self._heap)

    def unpark(self, request: Request) -> None:
        """Put a request back that was parked; no effect for others."""
        if self._parked.get(request.request_id) is request:
            del self._parked[request.request_id]
            heapq.heappush(self._heap, (self.key(request), request.index, request))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every member is either parked or in the heap, once."""
        entries = [request.request_id for _, _, request in self._heap if self._is_queued(request)]
        assert len(entries) == len(set(entries)), "a request is queued twice"
        assert set(entries) | set(self._parked) == set(self._members), "a request is lost to the queue"


class WaitingQueue:
    """Requests in the order of a policy: those of a group by key, groups by rank."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._groups: dict[Hashable, GroupQueue] = {}
        self._passing: list[Request] = []
        self._count = 0
        self.num_tokens = 0  #: prompt tokens of all members

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for group in self._groups.values():
            yield from group

    def push(self, request: Request) -> None:
        """Queue a request."""
        self._policy.queued(request)
        name = self._policy.group(request)
        group = self._groups.get(name) or GroupQueue(self._policy.key)
        try:
            group.push(request)
        except Exception:
            self._policy.removed(request)
            raise
        self._groups[name] = group
        self._count += 1
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        """Drop a request; no effect when it is not queued."""
        name = self._policy.group(request)
        group = self._groups.get(name)
        if group is not None and group.remove(request):
            self._left(name, group, request)
            self._policy.removed(request)

    def pop(self, request: Request) -> None:
        """Take out a request that was the head and has been admitted."""
        name = self._policy.group(request)
        group = self._groups[name]
        group.pop(request)
        self._left(name, group, request)
        self._policy.admitted(request)

    def _left(self, name: Hashable, group: GroupQueue, request: Request) -> None:
        self._count -= 1
        self.num_tokens -= request.num_prompt
        if not len(group):
            del self._groups[name]

    def head(self) -> Request | None:
        """The next request that is not parked; costs time per group."""
        if len(self._groups) == 1:
            (only,) = self._groups.values()
            return only.head()
        best: tuple[Any, int] | None = None
        found: Request | None = None
        for name, group in self._groups.items():
            request = group.head()
            if request is not None:
                place = self._policy.rank(name), request.index
                if best is None or place < best:
                    best, found = place, request
        return found

    def park(self, request: Request, *, passing: bool = False) -> None:
        """Set a request aside that was the head, until :meth:`unpark`, or if ``passing`` until
        :meth:`unpark_passing`."""
        self._groups[self._policy.group(request)].park(request)
        if passing:
            self._passing.append(request)

    def unpark(self, request: Request) -> None:
        """Put a request back that was parked; no effect for others."""
        group = self._groups.get(self._policy.group(request))
        if group is not None:
            group.unpark(request)

    def unpark_passing(self) -> None:
        """Put back what was parked for a step."""
        if self._passing:
            passing, self._passing = self._passing, []
            for request in passing:
                self.unpark(request)

    def ahead(self, request: Request) -> int:
        """How many members precede a member; goes through all of them."""
        place = self._place(request)
        return sum(self._place(other) < place for other in self)

    def _place(self, request: Request) -> tuple[Any, Hashable, Any, int]:
        policy = self._policy
        name = policy.group(request)
        # Groups of one rank take turns; for a moment they are told apart by their first member.
        first = self._groups[name].head() if len(self._groups) > 1 else None
        return policy.rank(name), -1 if first is None else first.index, policy.key(request), request.index

    def check_integrity(self) -> None:
        """Raise AssertionError when groups and counts contradict each other."""
        for group in self._groups.values():
            group.check_integrity()
            assert len(group), "an empty group is kept"
        assert sum(map(len, self._groups.values())) == self._count, "members are miscounted"
        assert sum(request.num_prompt for request in self) == self.num_tokens, "tokens are miscounted"
