"""Requests that wait for others to compute what they could share.

When many requests with the same beginning arrive at once, the first one computes it and the rest would do the same work
beside it. They are held instead until the first one's tokens are committed: only committed tokens are ever shared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trivet.context import Hold

if TYPE_CHECKING:
    from trivet.context import EngineContext
    from trivet.state import Request

_PLUGIN, _KIND = "paged", "prefix"


class PrefixSharing:
    """Who is computing which blocks, and who waits for that. Slots are those of the request table."""

    def __init__(self, context: EngineContext, block_size: int) -> None:
        self._context, self._table, self._size = context, context.table, block_size
        self._leaders: dict[bytes, int] = {}  # digest → slot
        self._leads: dict[int, list[bytes]] = {}  # slot → digests
        self._ends: dict[int, int] = {}  # slot → blocks of the smallest size at whose commit it has led enough
        self._waiting: dict[int, list[tuple[str, int]]] = {}  # slot → (request, committed blocks that it waits for)
        self.loading: set[int] = set()  #: slots whose loads are under way

    def wait(self, request: Request, chain: Sequence[bytes], ready: int, known: int) -> bool:
        """Whether the request, of ``known`` tokens, is held because at least half of what it would compute or load
        beyond the ``ready`` blocks in the pool is being computed, or loaded, by another one."""
        if ready >= len(chain) or not self._leaders:
            return False
        leader = self._leaders.get(chain[ready])
        if leader is None or not self._is_busy(leader):
            return False
        shared = ready + 1
        while shared < len(chain) and self._leaders.get(chain[shared]) == leader:
            shared += 1
        # The last known token is computed in any case, and so is the block that it completes.
        shared = min(shared, (known - 1) // self._size)
        saved = (shared - ready) * self._size
        if saved <= 0 or 2 * saved < known - ready * self._size:
            return False
        other = self._table.requests[leader]
        assert other is not None
        span = f"{ready * self._size} to {shared * self._size - 1}"
        detail = f"its tokens {span} are being computed or loaded by {other.request_id}, and will be shared"
        hold = Hold(_KIND, _PLUGIN, detail, time.monotonic(), {"tokens": saved})
        self._context.hold(request.request_id, hold)
        self._waiting.setdefault(leader, []).append((request.request_id, shared))
        return True

    def lead(self, slot: int, chain: Sequence[bytes], first: int) -> None:
        """An admitted request is going to compute or load the blocks of ``chain`` from ``first`` on."""
        mine = [digest for digest in chain[first:] if self._leaders.setdefault(digest, slot) == slot]
        if mine:
            self._leads[slot], self._ends[slot] = mine, len(chain)

    def advanced(self, slots: Sequence[int], committed: Sequence[int]) -> None:
        """``committed[i]`` blocks of ``slots[i]`` can be found now."""
        if self._leads:
            for slot, blocks in zip(slots, committed, strict=True):
                self._advanced(slot, blocks)

    def _advanced(self, slot: int, committed: int) -> None:
        if slot not in self._leads:
            return
        if committed >= self._ends[slot]:
            self.leave(slot)
            return
        waiting = self._waiting.get(slot)
        if waiting:
            self._release([name for name, needed in waiting if needed <= committed])
            rest = [entry for entry in waiting if entry[1] > committed]
            if rest:
                self._waiting[slot] = rest
            else:
                del self._waiting[slot]

    def leave(self, slot: int) -> None:
        """Everything that the slot was going to compute when it was admitted is committed, or never will be."""
        self._ends.pop(slot, None)
        for digest in self._leads.pop(slot, ()):
            del self._leaders[digest]
        self._release([name for name, _ in self._waiting.pop(slot, ())])

    def sweep(self) -> None:
        """Release those whose leader has come to a halt; asked at the end of every plan."""
        for slot in [slot for slot in self._waiting if not self._is_busy(slot)]:
            self._release([name for name, _ in self._waiting.pop(slot)])

    def _is_busy(self, slot: int) -> bool:
        return bool(self._table.in_flight[slot] > 0) or slot in self.loading

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self._context.release(name, _PLUGIN, _KIND)

    def check_integrity(self) -> None:
        """Leaders are running, and both maps agree."""
        led = {digest: slot for slot, digests in self._leads.items() for digest in digests}
        assert led == self._leaders, "leaders of blocks disagree"
        for slot in (*self._leads, *self._waiting):
            assert self._table.requests[slot] is not None, f"slot {slot} leads and is empty"
