"""The victim policies of the continuous scheduler: who is preempted when memory is short."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trivet.plan import Int32
from trivet.policies import VictimPolicy
from trivet.state import RequestTable

if TYPE_CHECKING:
    from trivet.context import EngineContext


class Newest(VictimPolicy):
    """The request admitted last, which has the least to lose on average and lets older ones finish."""

    def choose(self, slots: Int32, table: RequestTable) -> int:
        """See :meth:`VictimPolicy.choose`."""
        return int(slots[-1])


class LeastPriority(VictimPolicy):
    """The least urgent request (the greatest `priority`), of several the last one."""

    def choose(self, slots: Int32, table: RequestTable) -> int:
        """See :meth:`VictimPolicy.choose`."""
        best, lowest = int(slots[-1]), _priority(table, int(slots[-1]))
        for slot in slots[-2::-1].tolist():
            if (priority := _priority(table, slot)) > lowest:
                best, lowest = slot, priority
        return best


def _priority(table: RequestTable, slot: int) -> int:
    request = table.requests[slot]
    assert request is not None, f"slot {slot} is empty"
    return request.priority


class LeastComputed(VictimPolicy):
    """The request that is cheapest to redo: with the fewest computed tokens, of several the last one. So memory goes to
    those first who have computed most, and the very first gets on until it ends."""

    def order(self, slots: Int32, table: RequestTable) -> Int32:
        """See :meth:`VictimPolicy.order`."""
        ordered: Int32 = slots[(-table.num_computed[slots]).argsort(kind="stable")]
        return ordered

    def choose(self, slots: Int32, table: RequestTable) -> int:
        """See :meth:`VictimPolicy.choose`."""
        computed = table.num_computed[slots[::-1]]
        return int(slots[::-1][computed.argmin()])


class MostBlocks(VictimPolicy):
    """The request with the most blocks, of several the last one: the fewest preemptions, at the price of more work."""

    def bind(self, context: EngineContext) -> None:
        """See :meth:`Policy.bind`."""
        self._cache = context.get("cache")

    def choose(self, slots: Int32, table: RequestTable) -> int:
        """See :meth:`VictimPolicy.choose`."""
        most: int = max(reversed(slots.tolist()), key=self._blocks)
        return most

    def _blocks(self, slot: int) -> int:
        return sum(int(np.count_nonzero(table)) for table in self._cache.tables(slot))
