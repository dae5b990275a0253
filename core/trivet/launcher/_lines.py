"""Where ``trivet generate --input`` gets its requests from: a file, or what another program writes on the way."""

from __future__ import annotations

import queue
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

from trivet.errors import TrivetError
from trivet_schemas.batch_io import BatchLine, parse_batch_lines

if TYPE_CHECKING:
    from trivet_schemas.sampling import SamplingParams

Line = tuple[int, BatchLine | str]
"""The number of a line, and its request or what is wrong with it."""

_POLL_SECONDS = 0.05
_READ_AHEAD = 64


class Lines:
    """The lines of a file, read as they are asked for."""

    def __init__(self, file: IO[bytes], defaults: SamplingParams) -> None:
        self._file = file
        self._lines = parse_batch_lines(file, defaults)
        self.ended = False

    def next(self, *, wait: bool) -> Line | None:
        """The next line; None if there is none (now, or any more: then ``ended`` is set). ``wait`` a moment for it."""
        line = next(self._lines, None)
        self.ended = line is None
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PipedLines(Lines):
    """The lines of a pipe, read on a thread, so that requests run while the program at its other end thinks."""

    def __init__(self, file: IO[bytes], defaults: SamplingParams) -> None:
        super().__init__(file, defaults)
        self._queue: queue.Queue[Line | BaseException | None] = queue.Queue(_READ_AHEAD)
        threading.Thread(target=self._read, name="trivet-input", daemon=True).start()

    def next(self, *, wait: bool) -> Line | None:
        """See :meth:`Lines.next`."""
        if self.ended:
            return None
        try:
            item = self._queue.get(timeout=_POLL_SECONDS) if wait else self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        self.ended = item is None
        return item

    def close(self) -> None:
        """Nothing: the thread may be waiting in a read, and ends with the process."""

    def _read(self) -> None:
        try:
            for line in self._lines:
                self._queue.put(line)
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001  # raised again where the lines are taken
            self._queue.put(error)


def open_lines(path: str, defaults: SamplingParams) -> Lines:
    """The lines of a file, or of stdin for ``-``.

    Raises:
        TrivetError: The file cannot be read.
    """
    if path == "-":
        # A reader of its own: the interpreter must not find the thread inside sys.stdin when it ends.
        return PipedLines(open(sys.stdin.fileno(), "rb", closefd=False), defaults)
    try:
        return Lines(Path(path).open("rb"), defaults)
    except OSError as error:
        raise TrivetError(f"--input: {path} cannot be read: {error.strerror or error}") from error


def count_lines(path: str) -> int | None:
    """How many requests a file may hold: its lines that are not blank; None for a pipe."""
    if not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return sum(1 for line in file if not line.isspace())
