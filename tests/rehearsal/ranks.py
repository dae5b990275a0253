"""An executor with two workers whose results, extensions and transfers are reduced to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipe import PipeExecutor, PipeOptions, _Pending

from trivet.hookspecs import hookimpl
from trivet.plan import StepPlan
from trivet.provider import Provider
from trivet.result import StepResult, TransferQuorum, reduce_results
from trivet.roles import Executor, KVLayout, WorkerInfo


class _Both:
    def __init__(self, pending: list[_Pending], quorum: TransferQuorum, reducers: Any) -> None:
        self._pending, self._quorum, self._reducers = pending, quorum, reducers

    def done(self) -> bool:
        return all(p.done() for p in self._pending)

    def result(self) -> StepResult:
        results = [p.result() for p in self._pending]
        self._quorum.settle(results)
        return reduce_results(results, self._reducers)


class TwoRanks(Executor):
    """Both workers compute the same; the second one's tokens are dropped, as those of a tensor-parallel rank are."""

    def __init__(self, context: Any, options: Any) -> None:
        self._workers = [PipeExecutor(context, PipeOptions()) for _ in range(2)]
        self._context = context
        self._quorum = TransferQuorum(2)

    def start(self) -> WorkerInfo:
        first, _ = [w.start() for w in self._workers]
        self._reducers = self._context.reducers()
        return first

    def configure_cache(self, layout: KVLayout) -> None:
        for worker in self._workers:
            worker.configure_cache(layout)

    def submit(self, plan: StepPlan) -> _Both:
        return _Both([w.submit(plan) for w in self._workers], self._quorum, self._reducers)

    def call(self, method: str, *args: Any) -> list[Any]:
        return [w.call(method, *args)[0] for w in self._workers]

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.shutdown()


def join(parts: Sequence[bytes]) -> bytes:
    """The reducer of the extension ``rank``."""
    return b"".join(parts)


@hookimpl
def trivet_providers() -> list[Provider]:
    return [Provider("executor", "two_ranks", "ranks:TwoRanks", reducers={"rank": "ranks:join"})]
