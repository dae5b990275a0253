"""The waiting queue: a heap by policy key, with held requests parked aside."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from trivet.state import Request


class WaitingQueue:
    """Requests in ascending order of ``(key, arrival)``. Removal is lazy: a removed request is skipped when it
    surfaces."""

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
        """Queue a request at the place that its key gives it."""
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (self.key(request), request.index, request))

    def remove(self, request: Request) -> None:
        """Drop a request; no effect when it is not queued."""
        if self._members.get(request.request_id) is request:
            del self._members[request.request_id]
            self._parked.pop(request.request_id, None)

    def head(self) -> Request | None:
        """The next request that is not parked."""
        while self._heap:
            request = self._heap[0][2]
            if self._members.get(request.request_id) is request and request.request_id not in self._parked:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Take the head out."""
        del self._members[heapq.heappop(self._heap)[2].request_id]

    def park(self) -> None:
        """Set the head aside until :meth:`unpark`."""
        request = heapq.heappop(self._heap)[2]
        self._parked[request.request_id] = request

    def unpark(self, ready: Callable[[Request], bool]) -> None:
        """Put parked requests back that are ready."""
        for request in [r for r in self._parked.values() if ready(r)]:
            del self._parked[request.request_id]
            heapq.heappush(self._heap, (self.key(request), request.index, request))
