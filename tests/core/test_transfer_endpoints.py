"""What an endpoint's faults cost: its transfers, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trivet.plan import StepPlan, Transfer
from trivet.result import StepResult
from trivet.roles import TransferReport, TransferWorker
from trivet.worker.transfers import TransferEndpoints


class Broken(TransferWorker):
    """Takes transfers, and raises when it is asked for them."""

    endpoint = "broken"

    def bind(self, attention: Any) -> None:
        pass

    def submit(self, transfer: Transfer, *, store: bool) -> None:
        pass

    def poll(self) -> TransferReport:
        raise OSError("the other side is gone")


class Sound(TransferWorker):
    """Ends transfers at once."""

    endpoint = "sound"

    def __init__(self) -> None:
        self._report = TransferReport()

    def bind(self, attention: Any) -> None:
        pass

    def submit(self, transfer: Transfer, *, store: bool) -> None:
        self._report.finished.append(transfer.transfer_id)

    def poll(self) -> TransferReport:
        report, self._report = self._report, TransferReport()
        return report


@pytest.mark.parametrize("blocking", [False, True])
def test_an_endpoint_that_raises_fails_its_own_transfers_only(blocking: bool) -> None:
    endpoints = TransferEndpoints([Broken(), Sound()], 1)
    plan = StepPlan(step_id=1)
    for number, endpoint in enumerate(("broken", "sound", "broken")):
        blocks = [np.array([10 * number + 1, 10 * number + 2], np.int32)]
        plan.loads.append(Transfer(number, endpoint, 0, 1, 0, 8, blocks, [b"a", b"b"], blocking=blocking))
    invalid = endpoints.start_loads(plan)
    assert invalid[0].tolist() == [1, 2, 21, 22]
    result = StepResult(1, *(np.zeros(0, np.int64),) * 2, None)  # type: ignore[arg-type]
    endpoints.report(result)
    assert result.transfers_finished.tolist() == [1]
    assert result.transfers_failed.tolist() == [0, 2]
    assert not endpoints.pending
