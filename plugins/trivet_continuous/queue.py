"""The waiting queue: a heap by policy key, with held requests parked aside."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from trivet.state import Request

_SLACK = 64  # entries of removed requests that the heap may hold beside those of its members


class WaitingQueue:
    """Requests in ascending order of ``(key, arrival)``. Removal is lazy: a removed request is skipped when it
    surfaces, and swept out once such entries are the greater part. No operation goes through all members."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self.key = key
        self._heap: list[tuple[Any, int, Request]] = []
        self._parked: dict[str, Request] = {}
        self._passing: list[Request] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def push(self, request: Request) -> None:
        """Queue a request at the place that its key gives it."""
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (self.key(request), request.index, request))

    def remove(self, request: Request) -> None:
        """Drop a request; no effect when it is not queued."""
        if self._members.get(request.request_id) is request:
            del self._members[request.request_id]
            self._parked.pop(request.request_id, None)
            if len(self._heap) > 2 * len(self._members) + _SLACK:
                self._heap = [entry for entry in self._heap if self._is_queued(entry[2])]
                heapq.heapify(self._heap)

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

    def park(self, request: Request, *, passing: bool = False) -> None:
        """Set a request aside that was the head, until :meth:`unpark`, or if ``passing`` until
        :meth:`unpark_passing`."""
        self._take(request)
        self._parked[request.request_id] = request
        if passing:
            self._passing.append(request)

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

    def unpark_passing(self) -> None:
        """Put back what was parked for a step."""
        passing, self._passing = self._passing, []
        for request in passing:
            self.unpark(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every member is either parked or in the heap, once."""
        entries = [request.request_id for _, _, request in self._heap if self._is_queued(request)]
        assert len(entries) == len(set(entries)), "a request is queued twice"
        assert set(entries) | set(self._parked) == set(self._members), "a request is lost to the queue"
