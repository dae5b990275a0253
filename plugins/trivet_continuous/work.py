"""What is computed, and how much of it again because a preemption threw it away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.plan import Int32

if TYPE_CHECKING:
    from trivet.roles import Cache
    from trivet.state import Request, RequestTable


class Work:
    """Counts tokens, and says when too many are computed again.

    Requests are admitted without room for all that they may generate, since most stop earlier. Where that goes wrong
    too often, the bound is kept by admitting only what is sure never to be preempted, until the share is small again.

    Args:
        bound: Share of recomputed tokens that is put up with.
        window: Tokens after which everything before counts half.
    """

    def __init__(self, bound: float, window: int) -> None:
        self._bound, self._window = bound, window
        self.computed = 0.0
        self._recomputed = 0.0
        self._booked: tuple[Int32, int] | None = None

    def bind(self, cache: Cache, table: RequestTable) -> None:
        """Called once, before the first request."""
        self._cache, self._table = cache, table
        self._total = cache.stats().total

    @property
    def share(self) -> float:
        """Recomputed tokens, of all."""
        return self._recomputed / max(self.computed, 1.0)

    @property
    def is_wasted(self) -> bool:
        """Whether the share is above the bound."""
        return self._recomputed > self._bound * self.computed

    def admitted(self, recomputed: int) -> None:
        """A request runs again that has to compute ``recomputed`` tokens anew."""
        self._recomputed += recomputed
        if self.computed > self._window:
            self.computed, self._recomputed = self.computed / 2, self._recomputed / 2

    def has_room(self, request: Request) -> bool:
        """Whether there is memory for the whole length of a request beside those of all that run; True where the cache
        cannot tell."""
        table = self._table
        if not table.num_running:
            return True
        if self._booked is None or self._booked[0] is not table.order:
            running = (table.requests[slot] for slot in table.order.tolist())
            self._booked = table.order, sum(self._blocks(other) for other in running if other is not None)
        return self._booked[1] + self._blocks(request) <= self._total

    def _blocks(self, request: Request) -> int:
        return self._cache.request_blocks(request.max_total) or 0
