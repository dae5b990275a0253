"""From an exception to what the user sees and the exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from typing import TextIO

import typer

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def complain(message: object, *, kind: str = "error", stream: TextIO | None = None) -> None:
    """Print ``error: message`` to stderr."""
    out = sys.stderr if stream is None else stream
    colour = typer.colors.YELLOW if kind != "error" else typer.colors.RED
    typer.echo(f"{typer.style(f'{kind}:', fg=colour, bold=True)} {message}", file=out)


def exit_code(error: BaseException, *, debug: bool = False) -> int:
    """Report ``error`` and return the exit code.

    What a user can mend is one message without traceback (``debug`` adds it). Anything else is a fault of the program
    or of a plugin and keeps its traceback.
    """
    from trivet.errors import TrivetError
    from trivet_schemas.errors import SchemaError

    if isinstance(error, KeyboardInterrupt):
        complain("interrupted", kind="note")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        leave_pipe()
        return BROKEN_PIPE
    if isinstance(error, TrivetError | SchemaError):
        if debug:
            _print_traceback(error)
        complain(error)
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        leave_pipe()
        complain(f"the output cannot be written: {error.strerror}; what came before it is kept")
        return FAILED
    _print_traceback(error)
    complain(f"this is a fault of Trivet or of a plugin, not of your input: {type(error).__name__}: {error}")
    return FAILED


def set_up_logging(*, debug: bool = False) -> None:
    """Let warnings and errors of the log appear on stderr, like the command's own; with ``debug`` everything.

    Kernels say there too what makes a start wait: that they are being compiled.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(debug=debug))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=debug)
    logging.getLogger("trivet").setLevel(logging.DEBUG if debug else logging.NOTSET)
    logging.getLogger("trivet.kernels").setLevel(logging.NOTSET if debug else logging.INFO)


class _Formatter(logging.Formatter):
    """``warning: message``; the traceback of an exception whose message is enough is left out, unless debugging."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self._debug = debug

    def format(self, record: logging.LogRecord) -> str:
        from trivet.errors import TrivetError

        error = record.exc_info[1] if record.exc_info else None
        kind = "note" if record.levelno == logging.INFO else record.levelname.lower()
        text = f"{kind}: {record.getMessage()}"
        if self._debug:
            text = f"{record.levelname.lower()}: {record.name}: {record.getMessage()}"
        if error is None:
            return text
        if isinstance(error, TrivetError) and not self._debug:
            return f"{text}: {error}"
        return f"{text}\n{''.join(traceback.format_exception(error)).rstrip()}"


def leave_pipe() -> None:
    """Send what is still buffered nowhere, or the interpreter would complain about the pipe once more as it ends."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _print_traceback(error: BaseException) -> None:
    typer.echo("".join(traceback.format_exception(error)).rstrip(), file=sys.stderr)
