"""``trivet chat``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivet.launcher.errors import FAILED, WRONG_INPUT, complain
from trivet.launcher.options import ConfigArgument, SetOption, read_config

if TYPE_CHECKING:
    from trivet.launcher._session import Session
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.sampling import SamplingParams

_HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer, Ctrl-D leaves"
_PROMPT = ">>> "


def chat(
    config: ConfigArgument,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system message.", show_default=False)
    ] = None,
    set_: SetOption = None,
) -> None:
    """Talk to a model.

    Each line is a message; the answer appears as it is made. /reset forgets the conversation, /exit or Ctrl-D leaves,
    Ctrl-C stops the answer. Messages may come from a pipe, one per line. Sampling parameters are those of the file's
    `generate` section, except that an answer may fill the context unless `max_tokens` is set there.

    Exit code: 0; 2 for a model without a chat template and other wrong input. From a pipe: 2 if a message was refused,
    1 if an answer failed.
    """
    settings = read_config(config, set_)
    from trivet.launcher._session import Session

    with Session(settings) as session:
        if not session.tokenizer.has_chat_template:
            raise _no_template(settings)
        conversation = Conversation(session, _sampling(settings), system)
        code = _talk(conversation, interactive=sys.stdin.isatty())
    raise typer.Exit(code)


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, session: Session, sampling: SamplingParams, system: str | None = None) -> None:
        self._session, self._sampling = session, sampling
        self._opening: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._answers = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)

    def answer(self, text: str) -> str | None:
        """Stream the answer to a message to stdout.

        An interrupt ends the answer; what there is of it is kept.

        Returns:
            Why the answer failed; None if it did not.

        Raises:
            RequestError: The message is refused (the context is full); the conversation is as before.
        """
        from trivet_schemas.sampling import RequestOutputKind

        self._answers += 1
        messages = [*self.messages, {"role": "user", "content": text}]
        submission = self._session.prepare_chat(str(self._answers), messages, self._sampling, RequestOutputKind.DELTA)
        self._session.queue(submission)
        pieces: list[str] = []
        try:
            error = self._stream(pieces)
        except KeyboardInterrupt:
            self._session.abandon()
            error = None
        typer.echo()
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return error

    def _stream(self, pieces: list[str]) -> str | None:
        from trivet.batch import deferred_interrupt

        error = None
        with deferred_interrupt() as check_interrupt:
            while self._session.num_unfinished:
                for output in self._session.step():
                    error = output.error
                    for completion in output.outputs:
                        pieces.append(completion.text)
                        typer.echo(completion.text, nl=False)
                        sys.stdout.flush()
                check_interrupt()
        return error


def _talk(conversation: Conversation, *, interactive: bool) -> int:
    from trivet.errors import RequestError

    if interactive:
        complain(_HELP, kind="chat")
    code = 0
    while (text := _read(interactive=interactive)) is not None:
        if text == "/exit":
            break
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            complain(f"unknown command {text.split()[0]!r}; {_HELP}", kind="note")
        elif text:
            try:
                error = conversation.answer(text)
            except RequestError as refusal:
                complain(f"{refusal} (/reset forgets the conversation)")
                code = WRONG_INPUT
            else:
                if error is not None:
                    complain(error)
                    code = code or FAILED
    return 0 if interactive else code


def _read(*, interactive: bool) -> str | None:
    """The next message, stripped; None at the end of the input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input(_PROMPT if sys.stdout.isatty() else "").strip()
    except EOFError:
        typer.echo()
        return None
    except KeyboardInterrupt:
        typer.echo()
        return ""


def _sampling(config: EngineConfig) -> SamplingParams:
    sampling = config.generate.sampling
    changes: dict[str, Any] = {} if "max_tokens" in sampling.model_fields_set else {"max_tokens": None}
    return sampling.replace(**changes, n=1)


def _no_template(config: EngineConfig) -> Exception:
    from trivet.errors import RequestError

    return RequestError(
        f"the model {config.model!r} has no chat template; use a model made for chat, set `chat_template` to a file "
        "with one, or let `trivet generate` continue text"
    )
