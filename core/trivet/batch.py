"""Running a fixed set of requests to their ends, as :class:`trivet.LLM` does."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from trivet.errors import EngineUnhealthyError, OverloadedError
from trivet.output.stage import Output, OutputStage

if TYPE_CHECKING:
    from trivet.engine import Engine
    from trivet.submission import Submission


def run_batch(
    engine: Engine,
    stage: OutputStage,
    submissions: Sequence[Submission],
    report: Callable[[Output], None],
    check: Callable[[], None] = lambda: None,
) -> list[Output]:
    """Run ``submissions`` and return their last outputs in the same order.

    The queue of the engine is never flooded: what it refuses as overload waits here. Each final output is passed to
    ``report`` as it is made. An exception, an interrupt by the user among them, aborts every request of the batch and
    leaves the engine ready for the next one. ``check`` is called between steps, and may raise to that end.

    Raises:
        EngineUnhealthyError: The engine was shut down by somebody else, and the requests will never end.
    """
    batch = _Batch(engine, stage, submissions, report)
    try:
        with deferred_interrupt() as check_interrupt:
            while batch.unfinished:
                check()
                batch.feed()
                batch.step()
                check_interrupt()
    except BaseException:
        batch.abandon()
        raise
    return [batch.results[submission.request_id] for submission in submissions]


class _Batch:
    def __init__(
        self,
        engine: Engine,
        stage: OutputStage,
        submissions: Sequence[Submission],
        report: Callable[[Output], None],
    ) -> None:
        self._engine, self._stage, self._submissions, self._report = engine, stage, submissions, report
        self._waiting = deque((s, index) for s in submissions for index in range(len(s.children)))
        self.results: dict[str, Output] = {}

    @property
    def unfinished(self) -> bool:
        return len(self.results) < len(self._submissions)

    def feed(self) -> None:
        """Queue what the engine takes; raises if it has nothing to do then, and the requests would never end."""
        while self._waiting:
            submission, index = self._waiting[0]
            if submission.request_id not in self.results:  # else a sibling failed, and the request with it
                try:
                    request = submission.add(self._engine, index)
                except OverloadedError:
                    if not self._engine.has_work:
                        raise  # nothing will ever make room
                    return
                self._stage.add(submission, index, request)
            self._waiting.popleft()
        if not self._engine.has_work:
            raise EngineUnhealthyError(self._engine.fault or "the engine has been shut down while requests ran")

    def step(self) -> None:
        for output in self._stage.process(self._engine.step()):
            if output.finished:
                self.results[output.request_id] = output
                self._report(output)

    def abandon(self) -> None:
        """Abort everything and let the steps in flight settle."""
        self._engine.abort([child for submission in self._submissions for child in submission.child_ids])
        for submission in self._submissions:
            self._stage.drop(submission)
        while self._engine.has_unfinished:
            self._engine.step()


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Within, Ctrl-C raises where the yielded function is called, so that it never tears a step apart.

    A second Ctrl-C raises at once. Nothing changes outside the main thread, or where the program handles SIGINT itself.
    """
    pending = False

    def check() -> None:
        nonlocal pending
        if pending:
            pending = False
            raise KeyboardInterrupt

    def note(_signum: int, _frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
