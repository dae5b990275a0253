"""Movements of KV blocks in and out of the pool, as the worker sees them: started by a plan, reported by a later
result."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from trivet.plan import EMPTY_I32, Int32, StepPlan, Transfer
from trivet.result import StepResult
from trivet.roles.connector import TransferReport, TransferWorker

_logger = logging.getLogger(__name__)


class TransferEndpoints:
    """The worker halves of connectors and cache tiers, by the name that a :class:`trivet.plan.Transfer` calls them.

    Args:
        workers: The worker halves, already bound to the KV storage.
        num_groups: KV groups of the layout.
    """

    def __init__(self, workers: Iterable[TransferWorker], num_groups: int) -> None:
        self._workers = {worker.endpoint: worker for worker in workers}
        self._groups = num_groups
        self._open: dict[int, Transfer] = {}
        self._loads: set[int] = set()
        #: the last load, and the last store, that was started; they come in the order of their ids
        self._newest = {False: -1, True: -1}
        self._finished: list[int] = []
        self._failed: list[int] = []
        self._invalid: list[list[int]] = [[] for _ in range(num_groups)]

    @property
    def pending(self) -> bool:
        """Whether a transfer has been started and not yet ended."""
        return bool(self._open)

    def start_stores(self, plan: StepPlan) -> None:
        """Start the plan's stores, before anything overwrites the blocks they read. One that cannot be started has
        failed."""
        for transfer in plan.stores:
            self._submit(transfer, store=True)

    def start_loads(self, plan: StepPlan) -> list[Int32]:
        """Start the plan's loads, wait for those that block, and collect whatever else has ended.

        Returns, per KV group, the blocks whose content must not be used. A load that cannot be started has failed.

        Raises:
            RuntimeError: If an endpoint leaves a blocking load unfinished.
        """
        for transfer in plan.loads:
            self._submit(transfer, store=False)
        invalid = self.poll()
        late = [t for t in plan.loads if t.blocking and t.transfer_id in self._open]
        if late:
            first = late[0]
            raise RuntimeError(
                f"endpoint {first.endpoint!r} did not complete blocking load {first.transfer_id} within its step"
            )
        return invalid

    def give_up(self, plan: StepPlan) -> None:
        """Report those of the plan's transfers as failed that were not started, because the step broke off before."""
        for store, transfers in ((True, plan.stores), (False, plan.loads)):
            for transfer in transfers:
                if transfer.transfer_id > self._newest[store]:
                    self._begin(transfer, store=store)
                    self._end(transfer.transfer_id, failed=True)

    def poll(self) -> list[Int32]:
        """Collect what has ended; returns, per KV group, the blocks that became invalid since the last report."""
        if self._open:
            for endpoint, worker in self._workers.items():
                try:
                    report = worker.poll()
                except Exception:  # a recomputation again; requests that wait for a load would wait for ever
                    _logger.exception("endpoint %r could not say what has ended; all of its transfers fail", endpoint)
                    for transfer in [t for t in self._open.values() if t.endpoint == endpoint]:
                        self._end(transfer.transfer_id, failed=True)
                else:
                    self._take(report)
        return [np.array(blocks, np.int32) if blocks else EMPTY_I32 for blocks in self._invalid]

    def report(self, result: StepResult) -> None:
        """Put everything that ended since the last report into a result."""
        if not (self._finished or self._failed or any(self._invalid)):
            return
        result.transfers_finished = np.array(self._finished, np.int64)
        result.transfers_failed = np.array(self._failed, np.int64)
        if any(self._invalid):
            result.invalid_blocks = [np.unique(np.array(blocks, np.int32)) for blocks in self._invalid]
        self._finished, self._failed = [], []
        self._invalid = [[] for _ in range(self._groups)]

    @property
    def has_news(self) -> bool:
        """Whether :meth:`report` would report anything."""
        return bool(self._finished or self._failed)

    def _submit(self, transfer: Transfer, *, store: bool) -> None:
        self._begin(transfer, store=store)
        worker = self._workers.get(transfer.endpoint)
        if worker is None:
            known = ", ".join(sorted(self._workers)) or "none"
            _logger.error("transfer to endpoint %r fails: this worker has %s", transfer.endpoint, known)
            self._end(transfer.transfer_id, failed=True)
            return
        try:
            worker.submit(transfer, store=store)
        except Exception:  # an endpoint's fault costs a recomputation, not the step
            _logger.exception("endpoint %r could not start transfer %d", transfer.endpoint, transfer.transfer_id)
            self._end(transfer.transfer_id, failed=True)

    def _begin(self, transfer: Transfer, *, store: bool) -> None:
        self._open[transfer.transfer_id] = transfer
        self._newest[store] = transfer.transfer_id
        if not store:
            self._loads.add(transfer.transfer_id)

    def _take(self, report: TransferReport) -> None:
        for group, blocks in enumerate(report.invalid_blocks):
            self._invalid[group].extend(blocks)
        named = any(report.invalid_blocks)
        for transfer_id in report.finished:
            self._end(transfer_id, failed=False)
        for transfer_id in report.failed:
            self._end(transfer_id, failed=True, invalidate=not named)

    def _end(self, transfer_id: int, *, failed: bool, invalidate: bool = True) -> None:
        transfer = self._open.pop(transfer_id, None)
        if transfer is None:
            _logger.error("transfer %d was reported, but is not under way", transfer_id)
            return
        is_load = transfer_id in self._loads
        self._loads.discard(transfer_id)
        (self._failed if failed else self._finished).append(transfer_id)
        if failed and is_load and invalidate:
            # Without a word about which blocks are damaged, all that the load was to fill are.
            for group, blocks in enumerate(transfer.blocks):
                self._invalid[group].extend(np.asarray(blocks).tolist())
