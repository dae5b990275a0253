"""One thread that reads and writes files in the order in which it was asked to."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

_logger = logging.getLogger(__name__)


class Background:
    """Jobs run one after the other. Content that waits to be written is bounded by ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._waiting = 0  # bytes
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="trivet-offload", daemon=True)
        self._thread.start()

    def room(self, num_bytes: int) -> bool:
        """Whether so many bytes may be added now."""
        with self._changed:
            return not self._waiting or self._waiting + num_bytes <= self._most

    def add(self, job: Callable[[], object], num_bytes: int = 0) -> None:
        """Run ``job``, which keeps ``num_bytes`` of content until then."""
        with self._changed:
            self._jobs.append((job, num_bytes))
            self._waiting += num_bytes
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._closed:
                        return
                    self._changed.wait()
                job, num_bytes = self._jobs[0]
            try:
                job()
            except Exception:  # the thread must go on: what a job leaves undone is a miss later
                _logger.exception("reading or writing cached blocks failed")
            del job
            with self._changed:
                # A shutdown that ran out of patience has taken the rest away.
                if self._jobs:
                    self._jobs.popleft()
                    self._waiting -= num_bytes
                self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Do what was asked for, for so long at most; False if the time ran out. The rest is not done."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(max(deadline - time.monotonic(), 0))
        if not self._thread.is_alive():
            return True
        with self._changed:
            self._jobs.clear()
        self._thread.join(max(seconds, 0.0))
        return False
