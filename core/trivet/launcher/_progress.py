"""A progress bar on stderr, where there is somebody to see it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from trivet.launcher.errors import complain

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class RequestProgress:
    """Counts requests and tokens; shows them on a terminal. A context manager."""

    def __init__(self, total: int | None, *, done: int = 0, shown: bool) -> None:
        """``total`` None: not known. ``done``: finished by an earlier run. Without ``shown`` it only counts."""
        self._total, self._done = total, done
        self._tokens = 0
        self._start = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if shown and sys.stderr.isatty():
            self._bar, self._task = _make_bar(total, done)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_tokens: int = 0) -> None:
        """One more request has ended, with ``num_tokens`` generated."""
        self._done += 1
        self._tokens += num_tokens
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, rate=f"{self.rate:.1f} tokens/s")

    def complain(self, message: str) -> None:
        """Print an error above the bar."""
        if self._bar is not None:
            self._bar.console.print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
        else:
            complain(message)

    @property
    def rate(self) -> float:
        """Generated tokens per second since the start."""
        return self._tokens / max(time.monotonic() - self._start, 1e-9)

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return self._tokens

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start


def _make_bar(total: int | None, done: int) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("Requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    return bar, bar.add_task("requests", total=total, completed=done, rate="")
