"""``trivet generate --input``: any number of requests from a file or pipe, each result written as it is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trivet.batch import deferred_interrupt
from trivet.errors import RequestError, TrivetError
from trivet.launcher._lines import Lines, count_lines, open_lines
from trivet.launcher._progress import RequestProgress
from trivet.launcher._records import (
    OutputLock,
    Progress,
    RecordFile,
    check_output,
    error_record,
    recover,
    result_record,
)
from trivet.launcher._session import Session
from trivet.launcher.errors import FAILED, INTERRUPTED, WRONG_INPUT, complain
from trivet_schemas.sampling import RequestOutputKind

if TYPE_CHECKING:
    from trivet.submission import Submission
    from trivet_schemas.batch_io import BatchLine
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.outputs import RequestOutput
    from trivet_schemas.sampling import SamplingParams

PIPE = "-"
_MAX_COMPLAINTS = 20  # a file of another kind altogether must not flood the terminal


def generate_batch(
    config: EngineConfig, sampling: SamplingParams, input_: str, output: str, *, resume: bool, bar: bool
) -> int:
    """Run every line of ``input_`` and write a record per line to ``output``, in the order in which they finish.

    Returns:
        The exit code: WRONG_INPUT if a line was refused, else FAILED if a request failed as it ran, else 0.

    Raises:
        TrivetError: Before anything is loaded, for files that cannot be used.
    """
    path = None if output == PIPE else Path(output)
    if path is not None:
        check_output(path, resume=resume)
        if input_ != PIPE and path.exists() and Path(input_).exists() and path.samefile(input_):
            raise TrivetError(f"--output: {path} is the input; name another file")
    elif resume:
        raise TrivetError("--resume: needs --output FILE, to know what is done already")
    lines = open_lines(input_, sampling)
    lock = OutputLock()
    try:
        before = recover(path, lock) if path is not None and resume else Progress()
        _tell(output, before)
        with Session(config) as session:
            records = _open(path, resume=resume)
            try:
                if path is not None and path.is_file() and not lock.is_taken:
                    lock.take(path)
                total = count_lines(input_)
                with RequestProgress(total, done=len(before.done), shown=bar) as progress:
                    batch = _Batch(session, lines, records, progress, before.done)
                    return _run(batch, output, resumable=path is not None)
            finally:
                records.close()
    finally:
        lock.release()
        lines.close()


def _open(path: Path | None, *, resume: bool) -> RecordFile:
    if path is None:
        return RecordFile.stdout()
    # A device or a named pipe is written to, not made.
    return RecordFile.append(path) if resume or path.exists() else RecordFile.create(path)


def _tell(output: str, before: Progress) -> None:
    if before.is_torn:
        complain(f"{output}: an incomplete last line was cut off; its request is run again", kind="note")
    if before.num_errors:
        complain(f"{output}: {before.num_errors} lines that ended with an error are tried again", kind="note")
    if before.done:
        complain(f"{output}: {len(before.done)} requests are done already", kind="note")


def _run(batch: _Batch, output: str, *, resumable: bool) -> int:
    try:
        batch.run()
    except KeyboardInterrupt:
        hint = f" in {output}; add --resume to go on from there" if resumable else ""
        complain(f"interrupted: {batch.num_written} finished requests are kept{hint}", kind="note")
        return INTERRUPTED
    batch.summarise()
    return WRONG_INPUT if batch.num_refused else FAILED if batch.num_failed else 0


@dataclass(frozen=True, slots=True)
class _Running:
    """A request's id as the user gave it, and its line."""

    id: str
    line: int


class _Batch:
    """Feeds lines to a session and its results to a file."""

    def __init__(
        self, session: Session, lines: Lines, records: RecordFile, progress: RequestProgress, done: set[str]
    ) -> None:
        self._session, self._lines, self._records, self._progress = session, lines, records, progress
        self._done = done
        self._running: dict[str, _Running] = {}
        self.num_written = self.num_refused = self.num_failed = 0

    def run(self) -> None:
        """Until every line has its record. An interrupt is raised between two steps."""
        with deferred_interrupt() as check_interrupt:
            while not self._lines.ended or self._session.num_unfinished:
                check_interrupt()
                self._feed()
                if self._session.num_unfinished:
                    for output in self._session.step():
                        self._finish(output)

    def summarise(self) -> None:
        """Say on stderr what was done."""
        text = f"{self.num_written} requests, {self._progress.num_tokens} tokens in {self._progress.seconds:.1f} s"
        text += f" ({self._progress.rate:.1f} tokens/s)"
        if self.num_refused:
            text += f"; {self.num_refused} refused"
        if self.num_failed:
            text += f"; {self.num_failed} failed"
        complain(text, kind="done")

    def _feed(self) -> None:
        """Read lines while the engine can use more, and wait for one only when it has nothing to do."""
        session = self._session
        while not self._lines.ended and session.num_unfinished < session.max_unfinished:
            line = self._lines.next(wait=not session.num_unfinished)
            if line is None:
                return
            number, request = line
            if isinstance(request, str):
                self._refuse(None, number, request)
            elif request.id not in self._done:
                self._queue(number, request)

    def _queue(self, number: int, request: BatchLine) -> None:
        try:
            # An id of the engine's own: a user's "a#1" must not meet the second output of a user's "a".
            submission = self._prepare(str(number), request)
        except RequestError as error:
            self._refuse(request.id, number, str(error))
            return
        self._running[submission.request_id] = _Running(request.id, number)
        self._session.queue(submission)

    def _prepare(self, request_id: str, request: BatchLine) -> Submission:
        kind = RequestOutputKind.FINAL_ONLY
        if request.messages is not None:
            return self._session.prepare_chat(request_id, request.messages, request.sampling, kind)
        prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
        return self._session.prepare(request_id, prompt, request.sampling, kind)

    def _refuse(self, id_: str | None, number: int, problem: str) -> None:
        self.num_refused += 1
        self._complain(f"line {number}: {problem}")
        self._write(error_record(id_, number, problem))
        self._progress.advance()

    def _finish(self, output: RequestOutput) -> None:
        if not output.finished:
            return
        running = self._running.pop(output.request_id)
        if output.error is not None:
            self.num_failed += 1
            self._complain(f"line {running.line}: {output.error}")
        record = result_record(running.id, output, line=running.line)
        self._write(record)
        self._progress.advance(record["usage"]["completion_tokens"])

    def _write(self, record: dict[str, object]) -> None:
        self._records.write(record)
        self.num_written += 1

    def _complain(self, message: str) -> None:
        count = self.num_refused + self.num_failed
        if count <= _MAX_COMPLAINTS:
            self._progress.complain(message)
        elif count == _MAX_COMPLAINTS + 1:
            self._progress.complain("further errors are in the output only")
