"""A request from acceptance to end: slots given and taken, blocks kept until nobody reads them, transfers, ends.

Blocks of a request that ends or is preempted are *retired*: kept untouched until every step in flight that names
them has been committed. Blocks that a transfer reads or writes are *leased* until the workers report its end. So an
abort at any moment, in any state, is safe."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trivet.context import Hold
from trivet.events import Finished
from trivet.history import StepHistory
from trivet.plan import EMPTY_I32, EMPTY_I64, Int32, Int64, NewRequest, StepPlan, Transfer
from trivet.state import Request, RequestTable

if TYPE_CHECKING:
    from trivet.roles import Cache, Connector, ExternalHit, KVLayout, Scheduler


class Lifecycle:
    """Owns the map of unfinished requests and everything that outlives a slot. Belongs to the engine's thread."""

    def __init__(
        self,
        table: RequestTable,
        cache: Cache,
        scheduler: Scheduler,
        layout: KVLayout,
        *,
        stop_ids: Callable[[Request], tuple[int, ...]],
        draft_k: int = 0,
        connector: Connector | None = None,
        recent_steps: int = 1024,
    ) -> None:
        self.table, self.cache, self.scheduler, self._connector = table, cache, scheduler, connector
        self._stop_ids, self._draft_k = stop_ids, draft_k
        self._block_sizes = [g.block_size for g in layout.groups]
        self.requests: dict[str, Request] = {}
        self.history = StepHistory(table, scheduler, cache, recent_steps)
        self.ended: list[Finished] = []
        #: names of the adapters of running requests, by the index in ``table.adapter``
        self.adapters: list[str] = []
        self._last_submitted = -1
        self._leases: deque[tuple[int, int]] = deque()  # (step, lease): free once that step is committed
        self._transfers: dict[int, tuple[Transfer, int, bool]] = {}  # with lease, and whether it is a store
        self._external: set[int] = set()  # loads through the connector
        self._next_transfer = 0
        self._loads: list[Transfer] = []
        self._stores: list[Transfer] = []
        self._preempted: list[tuple[int, int]] = []
        self._finished: list[tuple[int, int]] = []
        self._parents: dict[Request, Request] = {}
        self._children: dict[Request, dict[Request, None]] = {}  # those that wait for their parent's prompt
        self._expecting: set[int] = set()  # slots of parents with such children
        self._releases: deque[tuple[Request, str, str]] = deque()
        self._aborts: list[tuple[Request, str, str]] = []

    # ------------------------------------------------------------------ coming

    def accept(self, request: Request) -> None:
        """Queue a valid request."""
        parent = self.requests.get(request.parent) if request.parent is not None else None
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.history.added(request)
        if parent is not None and self.cache.can_fork:
            self._parents[request] = parent
            self._children.setdefault(parent, {})[request] = None
            if parent.slot >= 0:
                self._expecting.add(parent.slot)
            detail = f"the prompt is being computed by {parent.request_id}"
            self.hold(request, Hold("parent", "core", detail, time.monotonic(), {"tokens": request.num_prompt}))

    def parent(self, request: Request) -> Request | None:
        """The request whose blocks ``request`` may share, if the cache can do that; it may have ended."""
        return self._parents.get(request)

    def assign(self, request: Request) -> int:
        """Give a request a slot."""
        slot = self.table.assign(request, self._stop_ids(request), self._draft_k)
        if request in self._children:
            self._expecting.add(slot)
        if request.adapter is not None:
            self.table.adapter[slot] = self._adapter_index(request.adapter)
        return slot

    def admitted(self, request: Request) -> None:
        """A request has its slot and its blocks."""
        self.history.changed(request, "admitted")

    def unassign(self, slot: int) -> None:
        """Take back the slot of a request whose admission failed, and the blocks that it got so far."""
        self.cache.settle(self.cache.retire(slot))
        self.table.unassign(slot)
        self._expecting.discard(slot)

    def _adapter_index(self, name: str) -> int:
        if name in self.adapters:
            return self.adapters.index(name)
        used = set(self.table.adapter[self.table.order].tolist())
        for index in range(len(self.adapters)):
            if index not in used:
                self.adapters[index] = name
                return index
        self.adapters.append(name)
        return len(self.adapters) - 1

    def hold(self, request: Request, hold: Hold) -> None:
        """Keep a request from being scheduled."""
        self.apply_releases()  # those that came before this hold must not take it back
        request.holds[hold.plugin, hold.kind] = hold
        if request.slot >= 0:
            self.table.held[request.slot] = True
        self.history.changed(request, "held")

    def release(self, request: Request, plugin: str, kind: str) -> None:
        """Take a hold back."""
        if request.holds.pop((plugin, kind), None) is None or request.finish_reason is not None:
            return
        if request.slot >= 0:
            self.table.held[request.slot] = bool(request.holds)
        elif not request.holds:
            self.scheduler.released(request)
        self.history.changed(request, "released")

    def release_later(self, request: Request, plugin: str, kind: str) -> None:
        """Take a hold back before the next plan is made; may be called from any thread."""
        self._releases.append((request, plugin, kind))

    def apply_releases(self) -> None:
        """Carry out what :meth:`release_later` was asked for."""
        while self._releases:
            self.release(*self._releases.popleft())

    def release_children(self) -> None:
        """Let children run whose parent's prompt has been computed."""
        if not self._expecting:
            return
        table = self.table
        for slot in [s for s in self._expecting if table.num_committed[s] >= table.num_prompt[s]]:
            self._expecting.discard(slot)
            parent = table.requests[slot]
            assert parent is not None
            self._release_children(parent)

    def _release_children(self, parent: Request) -> None:
        for child in self._children.pop(parent, {}):
            self.release(child, "core", "parent")

    @property
    def waits_for_workers(self) -> bool:
        """Whether a report is due from the workers that needs no rows (grammars, transfers)."""
        if self._transfers:
            return True
        held = self.table.held
        return bool(held.any()) and any(
            ("core", "grammar") in r.holds for r in self.table.requests if r is not None and r.holds
        )

    # ------------------------------------------------------------------ going

    def finish(
        self,
        request: Request,
        reason: str,
        *,
        stop_reason: int | str | None = None,
        message: str | None = None,
        num_output: int | None = None,
    ) -> None:
        """End a request, wherever it is; a second end has no effect. ``num_output`` cuts its outputs."""
        if request.finish_reason is not None:
            return
        if request.slot >= 0:
            slot, epoch = request.slot, request.epoch
            if self._connector is not None and reason in ("stop", "length"):
                self._store_finished(request, slot)
            self._vacate(slot)
            self._finished.append((slot, epoch))
        else:
            self.scheduler.remove(request)
        if num_output is not None:
            del request.output_ids[num_output:]
        request.finish_reason, request.stop_reason, request.message = reason, stop_reason, message
        request.finished_time = time.monotonic()
        request.holds.clear()
        self.history.ended(request)
        self._leave(request)
        self.ended.append(Finished(request, reason, stop_reason, message, len(request.output_ids)))

    def abort(self, request: Request, reason: str, message: str) -> None:
        """End a request at any moment: at once where no plan can name it, else with :meth:`apply_aborts`."""
        if request.slot < 0:
            self.finish(request, reason, message=message)
        else:
            self._aborts.append((request, reason, message))

    def apply_aborts(self) -> None:
        """Carry out what :meth:`abort` put off; called while no plan is being made or sent."""
        aborts, self._aborts = self._aborts, []
        for request, reason, message in aborts:
            self.finish(request, reason, message=message)

    def _leave(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        parent = self._parents.pop(request, None)
        if parent is not None:
            self._children.get(parent, {}).pop(request, None)
        # Children whose parent is gone compute the prompt themselves.
        self._release_children(request)

    def force_end(self, request: Request, reason: str, message: str | None) -> None:
        """End a request whose slot or blocks cannot be given back in order, after a fault of the core."""
        request.finish_reason, request.message = reason, message
        request.finished_time = time.monotonic()
        self.history.ended(request)
        self.requests.pop(request.request_id, None)
        self.ended.append(Finished(request, reason, None, message, len(request.output_ids)))

    def preempt(self, slot: int) -> Request:
        """Take slot and blocks from a running request and queue it again under a later epoch."""
        request = self.table.requests[slot]
        assert request is not None
        request.num_lost_tokens = int(self.table.num_computed[slot])
        self._preempted.append((slot, request.epoch))
        self._vacate(slot)
        # What the worker knew of this admission is gone, so what was held for it starts again at the next one.
        for key in [k for k, h in request.holds.items() if h.kind in ("grammar", "transfer") and h.plugin == "core"]:
            del request.holds[key]
        request.num_preemptions += 1
        self.scheduler.requeue(request)
        self.history.changed(request, "preempted")
        return request

    def _vacate(self, slot: int) -> None:
        flying = int(self.table.in_flight[slot]) > 0
        lease = self.cache.retire(slot)
        self.table.release(slot)
        self._expecting.discard(slot)
        if flying:
            self._leases.append((self._last_submitted, lease))
        else:
            self.cache.settle(lease)

    # ------------------------------------------------------------------ steps

    @property
    def has_retired(self) -> bool:
        """Whether blocks wait for steps in flight."""
        return bool(self._leases)

    @property
    def has_transfers(self) -> bool:
        """Whether transfers are under way or wait to be sent."""
        return bool(self._transfers)

    def wants(self, plan: StepPlan, *, busy: bool) -> bool:
        """Whether a plan is to be sent. With steps in flight (``busy``) reports arrive anyway; a plan without rows is
        only for asking."""
        useful = plan.num_rows or plan.new or plan.loads or plan.stores
        return bool(useful) or (not busy and self.waits_for_workers)

    def submitted(self, plan: StepPlan) -> None:
        """A plan was sent; blocks retired from now on wait for it."""
        self._last_submitted = plan.step_id

    def settle(self, step_id: int) -> None:
        """A step was committed (or failed): free what waited for it."""
        while self._leases and self._leases[0][0] <= step_id:
            self.cache.settle(self._leases.popleft()[1])

    def unsent(self, plan: StepPlan) -> None:
        """A plan never reached the workers: its news must travel with the next one."""
        self._preempted[:0] = zip(plan.preempted.tolist(), plan.preempted_epochs.tolist(), strict=True)
        self._finished[:0] = zip(plan.finished.tolist(), plan.finished_epochs.tolist(), strict=True)
        self._loads[:0], self._stores[:0] = plan.loads, plan.stores
        for new in plan.new:
            if self.live(new) and not bool((plan.slots == new.slot).any()):
                self.preempt(new.slot)

    def live(self, key: NewRequest | Transfer) -> bool:
        """Whether the admission that ``key`` names still has its slot."""
        return key.slot >= 0 and bool(self.table.epoch[key.slot] == key.epoch)

    def take_preempted(self) -> tuple[Int32, Int64]:
        """Slots and epochs to report to the workers, once."""
        return self._take(self._preempted)

    def take_finished(self) -> tuple[Int32, Int64]:
        """Slots and epochs to report to the workers, once."""
        return self._take(self._finished)

    @staticmethod
    def _take(pairs: list[tuple[int, int]]) -> tuple[Int32, Int64]:
        if not pairs:
            return EMPTY_I32, EMPTY_I64
        slots, epochs = zip(*pairs, strict=True)
        pairs.clear()
        return np.array(slots, np.int32), np.array(epochs, np.int64)

    def take_ended(self) -> list[Finished]:
        """Requests that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    # ------------------------------------------------------------------ transfers

    def take_transfers(self) -> tuple[list[Transfer], list[Transfer]]:
        """Loads and stores for the plan, once."""
        loads, stores = self._loads, self._stores
        self._loads, self._stores = [], []
        return loads, stores

    def external_load(self, slot: int, request: Request, start: int, count: int, hit: ExternalHit) -> Transfer:
        """A load of ``count`` tokens from ``start`` on through the connector."""
        assert self._connector is not None
        tables = self.cache.tables(slot)
        blocks = [
            table[start // size : -(-(start + count) // size)]
            for table, size in zip(tables, self._block_sizes, strict=True)
        ]
        return Transfer(
            -1, self._connector.endpoint, slot, request.epoch, start, count, blocks, hit.keys, hit.blocking, hit.payload
        )

    def start_load(self, request: Request, load: Transfer, *, external: bool) -> None:
        """Number a load, lease its blocks, hold the request unless the load is part of the step. ``external``: through
        the connector, not asked for by the cache."""
        self._start(load, self._loads, store=False)
        if external:
            self._external.add(load.transfer_id)
        if not load.blocking:
            detail = f"{load.num_tokens} tokens are being loaded through {load.endpoint}"
            self.hold(request, Hold("transfer", "core", detail, time.monotonic(), {"tokens": load.num_tokens}))

    def start_store(self, store: Transfer) -> None:
        """Number a store and lease its blocks, unless it reads them before anything is written."""
        self._start(store, self._stores, store=True)

    def _start(self, transfer: Transfer, queue: list[Transfer], *, store: bool) -> None:
        self._next_transfer += 1
        transfer.transfer_id = self._next_transfer
        unleased = store and transfer.blocking
        blocks = [EMPTY_I32 for _ in transfer.blocks] if unleased else transfer.blocks
        self._transfers[transfer.transfer_id] = (transfer, self.cache.lease(blocks), store)
        queue.append(transfer)

    def _store_finished(self, request: Request, slot: int) -> None:
        assert self._connector is not None
        tables = self.cache.tables(slot)
        hit = self._connector.finished(request, tables)
        if hit is None or hit.num_tokens < 1:
            return
        blocks = [t[: -(-hit.num_tokens // size)] for t, size in zip(tables, self._block_sizes, strict=True)]
        endpoint = self._connector.endpoint
        store = Transfer(-1, endpoint, slot, request.epoch, 0, hit.num_tokens, blocks, hit.keys, payload=hit.payload)
        self.start_store(store)

    def end_transfers(self, finished: Int64, failed: Int64, invalid: Sequence[Int32]) -> set[int]:
        """Take over the workers' report; returns the slots whose computed tokens were rewound."""
        rewound: set[int] = set()
        if not (len(finished) or len(failed) or invalid):
            return rewound
        sharers = self.cache.invalidate(invalid) if any(len(b) for b in invalid) else []
        own = {self._transfers[i][0].slot for i in failed.tolist() if i in self._transfers}
        for slot, valid in sharers:
            if slot in own:
                self._rewind(slot, valid, rewound)
            elif int(self.table.num_computed[slot]) > valid:
                # Two requests must not both compute into one block.
                self.preempt(slot)
        for transfer_id in finished.tolist() + failed.tolist():
            if transfer_id not in self._transfers:
                continue
            transfer, lease, is_store = self._transfers.pop(transfer_id)
            self.history.progress += 1
            external = transfer_id in self._external
            self._external.discard(transfer_id)
            self.cache.transfer_ended(transfer, ok=transfer_id not in failed)
            self.cache.settle(lease)
            if is_store or not self.live(transfer):
                continue
            request = self.table.requests[transfer.slot]
            assert request is not None
            slot = transfer.slot
            if transfer_id in failed and not external:
                # The table was made for this content: only a new look at the cache says what else can be used.
                if not request.num_preemptions:
                    request.num_cached_tokens = -1
                self.preempt(slot)
                rewound.discard(slot)
                request.num_lost_tokens = 0
                continue
            if transfer_id in failed:
                self._rewind(slot, self._valid_until(transfer, invalid), rewound)
                if not request.num_preemptions:
                    request.num_cached_tokens = min(request.num_cached_tokens, int(self.table.num_computed[slot]))
            same = (slot, transfer.epoch)
            if any((t.slot, t.epoch) == same and not stores for t, _, stores in self._transfers.values()):
                continue
            # What is computed by a step in flight is committed with that step.
            if not self.table.in_flight[slot]:
                self.table.num_committed[slot] = self.table.num_computed[slot]
            self.release(request, "core", "transfer")
        return rewound

    def _valid_until(self, transfer: Transfer, invalid: Sequence[Int32]) -> int:
        valid = transfer.start_token + transfer.num_tokens
        named = False
        for size, blocks, bad in zip(self._block_sizes, transfer.blocks, invalid, strict=False):
            hits = np.flatnonzero(np.isin(blocks, bad))
            if len(hits):
                named = True
                valid = min(valid, max(transfer.start_token, (transfer.start_token // size + int(hits[0])) * size))
        return valid if named else transfer.start_token

    def _rewind(self, slot: int, valid: int, rewound: set[int]) -> None:
        if int(self.table.num_computed[slot]) > valid:
            self.table.num_computed[slot] = valid
            self.table.num_committed[slot] = min(int(self.table.num_committed[slot]), valid)
            rewound.add(slot)

    def check_integrity(self) -> None:
        """The map of requests agrees with the table, and blocks add up."""
        self.table.check_integrity()
        for slot in self.table.order.tolist():
            request = self.table.requests[slot]
            assert request is not None
            assert self.requests.get(request.request_id) is request, f"{request.request_id} runs but is not listed"
        stats = self.cache.stats()
        assert stats.free + stats.used + stats.retired + stats.leased == stats.total, stats
        self.cache.check_integrity()
        self.scheduler.check_integrity()
