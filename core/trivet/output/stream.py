"""From the thread that makes outputs to the event loop of the consumer who waits for them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from trivet.output.merge import merge_outputs
from trivet_schemas.sampling import RequestOutputKind

if TYPE_CHECKING:
    from trivet.output.stage import Output
    from trivet.submission import Submission


class Stream:
    """What waits for one consumer. Filled by the output thread, emptied in the consumer's event loop, in which it is
    made."""

    def __init__(self, submission: Submission) -> None:
        """Nothing waits yet for the consumer of ``submission``."""
        self.submission = submission
        self.loop = asyncio.get_running_loop()
        #: set, in the loop, when something was put
        self.arrived = asyncio.Event()
        #: whether the consumer has the last output, or the error
        self.finished = False
        self._lock = threading.Lock()
        self._waiting: list[Output] = []
        self._error: Exception | None = None

    def put(self, output: Output) -> None:
        """Add an output; a consumer that is slow gets several as one."""
        with self._lock:
            if self.submission.output_kind is not RequestOutputKind.DELTA:
                self._waiting.clear()  # the newest says everything
            self._waiting.append(output)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` to the consumer, behind what waits."""
        with self._lock:
            self._error = error

    async def next(self) -> Output:
        """The next output; raises the error behind the last one."""
        while True:
            self.arrived.clear()
            with self._lock:
                waiting, self._waiting = self._waiting, []
                error = None if waiting else self._error
            if waiting:
                output = merge_outputs(waiting, self.submission.output_kind)
                self.finished = output.finished
                return output
            if error is not None:
                self.finished = True
                raise error
            await self.arrived.wait()
