"""The JSON objects, one per line, that ``trivet generate`` writes, and the file of them that a run can go on with."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trivet.errors import TrivetError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trivet_schemas.outputs import CompletionOutput, Logprob, RequestOutput

Record = dict[str, Any]


def result_record(id_: str, output: RequestOutput, *, line: int | None = None, prompt: str | None = None) -> Record:
    """What came of a request: ``id``, ``line`` or ``prompt``, ``outputs``, ``usage``, and ``error`` if it failed."""
    record: Record = {"id": id_}
    if line is not None:
        record["line"] = line
    if prompt is not None:
        record["prompt"] = prompt
    if output.error is not None:
        record["error"] = output.error
    record["outputs"] = [_completion(completion) for completion in output.outputs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    record["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids or ()),
        "completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
        "cached_tokens": output.num_cached_tokens or 0,
    }
    return record


def error_record(id_: str | None, line: int, error: str) -> Record:
    """A line that was refused; ``id`` is None if the line could not be read."""
    return {"id": id_, "line": line, "error": error}


def to_line(record: Record) -> str:
    """One line of JSON, without its end."""
    return json.dumps(record, ensure_ascii=False)


def _completion(completion: CompletionOutput) -> Record:
    record: Record = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
        record["logprobs"] = _logprobs(completion.logprobs)
    return record


def _logprobs(positions: Sequence[Mapping[int, Logprob] | None]) -> list[Record | None]:
    return [
        None
        if position is None
        else {
            str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in position.items()
        }
        for position in positions
    ]


class RecordFile:
    """Writes records, each at once and whole, so that a run that is killed loses none that it finished."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    @classmethod
    def create(cls, path: Path) -> RecordFile:
        """A new file. Raises TrivetError if there is one of that name."""
        try:
            return cls(path.open("xb"))
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:
            raise _unwritable(path, error) from error

    @classmethod
    def append(cls, path: Path) -> RecordFile:
        """A file that may be there already."""
        try:
            return cls(path.open("ab"))
        except OSError as error:
            raise _unwritable(path, error) from error

    @classmethod
    def stdout(cls) -> RecordFile:
        """Standard output."""
        return cls(sys.stdout.buffer)

    def write(self, record: Record) -> None:
        """Write a record and hand it to the operating system."""
        self._file.write(to_line(record).encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; standard output stays open."""
        if self._file is not sys.stdout.buffer:
            self._file.close()


class OutputLock:
    """Keeps other runs away from an output file until it is released; advisory, and where files can be locked."""

    def __init__(self) -> None:
        self._files: list[IO[bytes]] = []

    @property
    def is_taken(self) -> bool:
        """Whether a file was locked."""
        return bool(self._files)

    def release(self) -> None:
        """Let other runs in."""
        for file in self._files:
            file.close()

    def take(self, path: Path) -> None:
        """Lock the file that ``path`` names now; what was locked before stays so.

        Raises:
            TrivetError: Another run holds it.
        """
        try:
            fcntl: Any = importlib.import_module("fcntl")
        except ImportError:
            return  # Windows has no such module, nor another way that leaves the file readable
        try:
            file = path.open("ab")
        except OSError as error:
            raise _unwritable(path, error) from error
        self._files.append(file)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrivetError(
                f"--output: another run is writing {path}; wait for its end, or name another file"
            ) from None
        except OSError as error:
            # Some network file systems cannot lock; the run itself can do without.
            logging.getLogger(__name__).info("%s cannot be locked: %s", path, error)


@dataclass(slots=True)
class Progress:
    """What an earlier run left: the ids that are done, and what is to be done again."""

    done: set[str] = field(default_factory=set)
    num_errors: int = 0
    is_torn: bool = False


def check_output(path: Path, *, resume: bool) -> None:
    """Refuse, before anything is loaded, an output file that could not be written.

    Raises:
        TrivetError: The file exists and the run is not to be resumed, it is a folder, or its folder is missing.
    """
    if path.is_dir():
        raise TrivetError(f"--output: {path} is a folder; name a file in it")
    if path.is_file() and not resume:
        raise _exists(path)
    if not path.parent.is_dir():
        raise TrivetError(f"--output: the folder {path.parent} does not exist; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise TrivetError(f"--output: no permission to write {path}")


def recover(path: Path, lock: OutputLock) -> Progress:
    """Read what an earlier run left in ``path``, and leave there only what is done.

    A last line that is cut off goes, and so do records of errors, whose lines are tried again. The file is replaced as
    a whole, so that a crash in between loses nothing. ``lock`` takes the file, and the one that replaces it.

    Raises:
        TrivetError: A line is no record of this program, or another run is writing; the file is then left alone.
    """
    progress = Progress()
    if not path.is_file():
        return progress
    path = path.resolve()
    lock.take(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                progress.is_torn = True
            elif (done := _done_id(path, number, line)) is None:
                progress.num_errors += 1
            else:
                progress.done.add(done)
    if progress.is_torn or progress.num_errors:
        _keep_done(path, lock)
    return progress


def _done_id(path: Path, number: int, line: bytes) -> str | None:
    """The id of a finished record, None for one of an error."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "id" not in record or not ("outputs" in record or "error" in record):
        raise TrivetError(
            f"--resume: line {number} of {path} is no record of `trivet generate`; name the output file of the run "
            "that was interrupted"
        )
    return None if "error" in record else str(record["id"])


def _keep_done(path: Path, lock: OutputLock) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        with path.open("rb") as source, partial.open("wb") as target:
            for number, line in enumerate(source, start=1):
                if line.endswith(b"\n") and _done_id(path, number, line) is not None:
                    target.write(line)
            target.flush()
            os.fsync(target.fileno())
        shutil.copymode(path, partial)
        lock.take(partial)
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _exists(path: Path) -> TrivetError:
    return TrivetError(
        f"--output: {path} exists; add --resume to go on with that run, or name another file (nothing is overwritten)"
    )


def _unwritable(path: Path, error: OSError) -> TrivetError:
    return TrivetError(f"--output: {path} cannot be written: {error.strerror or error}")
