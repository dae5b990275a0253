"""The output stage on a thread of its own, so that making text does not delay the next step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from trivet.output.stage import Output, OutputStage

if TYPE_CHECKING:
    from trivet.events import CommitEvents

_MAX_BEHIND = 64


class OutputThread:
    """Runs work on an :class:`OutputStage` in the order in which it was put.

    At most ``max_behind`` commits wait; :meth:`put` blocks beyond that, which slows the engine to what can be shown.
    """

    def __init__(
        self,
        stage: OutputStage,
        deliver: Callable[[list[Output]], None],
        failed: Callable[[BaseException], None],
        *,
        max_behind: int = _MAX_BEHIND,
    ) -> None:
        """Start the thread.

        Args:
            stage: Touched by this thread alone from now on.
            deliver: Called on the thread with the outputs of each commit.
            failed: Called on the thread, once, with the exception that ended it; what is put afterwards is dropped.
            max_behind: Commits that may wait.
        """
        self._stage, self._deliver, self._failed = stage, deliver, failed
        self._work: queue.Queue[CommitEvents | Callable[[OutputStage], None] | None] = queue.Queue(max_behind)
        self._thread = threading.Thread(target=self._main, name="trivet-output", daemon=True)
        self._thread.start()

    def put(self, work: CommitEvents | Callable[[OutputStage], None]) -> None:
        """Process events, or call a function with the stage, after everything that was put before."""
        self._work.put(work)

    def close(self) -> None:
        """Finish what was put, then end the thread."""
        self._work.put(None)
        self._thread.join()

    def _main(self) -> None:
        failed = False
        while (work := self._work.get()) is not None:
            if failed:
                continue  # the engine must not block on a queue that nobody empties
            try:
                if callable(work):
                    work(self._stage)
                else:
                    self._deliver(self._stage.process(work))
            except Exception as exc:  # noqa: BLE001  # handed on: the owner ends everything with it
                failed = True
                self._failed(exc)
