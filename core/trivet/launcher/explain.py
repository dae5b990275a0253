"""``trivet explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trivet.launcher.errors import FAILED, WRONG_INPUT, complain
from trivet.launcher.options import JsonOption, SetOption, read_config

if TYPE_CHECKING:
    from trivet.launcher._lines import Lines
    from trivet.launcher._session import Session
    from trivet.launcher._stories import Record
    from trivet.submission import Submission
    from trivet_schemas.batch_io import BatchLine
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.outputs import RequestOutput

_STEPS = 16_384  # remembered at least, since it is steps that are asked for
_FEW = 10  # ids that are named where there is not the one that was asked for


def explain(
    source: Annotated[
        Path,
        typer.Argument(metavar="CONFIG|DUMP", help="The YAML file, or a dump of the watchdog.", show_default=False),
    ],
    input_: Annotated[
        str | None,
        typer.Option("--input", "-i", metavar="FILE", help="Requests to run, one JSON object per line; - is stdin."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            "--request",
            "-r",
            metavar="ID",
            help="The request to tell about step by step; else the one that waited most.",
        ),
    ] = None,
    as_json: JsonOption = False,
    set_: SetOption = None,
) -> None:
    """Run requests and say what each one waited for, or read what an engine that gave up has left.

    With --input, the lines run as `trivet generate --input` runs them (output i of several is ID#i). For each there are
    the engine's steps since its arrival: those in which it ran, those in which it waited by the reason, with seconds;
    how often it was preempted, and its tokens that were found in the cache or computed again. A line that is refused
    has a row of its own. Then the spans of one request: `compute` (the step's token budget went to others), `memory`
    (too few blocks are free), `turn` (others are ahead), or what held it (`grammar`, `parent`, `prefix`, `transfer`,
    ...).

    Without --input, the file is a dump as `watchdog.dump` names it: the same of the requests that were unfinished,
    with the last steps and where every thread stood.

    --json prints one object per request, with all spans; of a dump, the dump.

    Exit code: 0; 1 if a request failed while it ran; 2 if a request was refused or anything else in the input is wrong.
    """
    from trivet.launcher._stories import print_dump, print_stories, read_dump
    from trivet.launcher._tables import heading

    if input_ is None:
        if set_:
            raise typer.BadParameter("goes with --input", param_hint="--set")
        dump = read_dump(source)
        found = print_dump(dump, request, as_json=as_json)
        stories, code = dump["requests"], 0
    else:
        config = read_config(source, set_)
        stories, code = _run(config, input_)
        if not as_json:
            heading("steps that requests ran and waited")
        found = print_stories(stories, request, as_json=as_json)
    if not found:
        complain(f"--request: there is no request {request!r}; {_known([story['request_id'] for story in stories])}")
        code = WRONG_INPUT
    raise typer.Exit(code)


def _known(names: list[str]) -> str:
    if not names:
        return "there is none at all"
    shown = ", ".join(map(repr, names[:_FEW]))
    return f"there are {shown}" + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def _run(config: EngineConfig, input_: str) -> tuple[list[Record], int]:
    from trivet.batch import deferred_interrupt
    from trivet.launcher._lines import open_lines
    from trivet.launcher._session import Session

    config = config.model_copy(update={"recent_steps": max(config.recent_steps, _STEPS)})
    lines = open_lines(input_, config.generate.sampling)
    try:
        with Session(config) as session, deferred_interrupt() as check_interrupt:
            run = _Run(session, lines)
            while not lines.ended or session.num_unfinished:
                check_interrupt()
                run.feed()
                if session.num_unfinished:
                    for output in session.step():
                        run.finish(output)
            return run.stories, run.code
    finally:
        lines.close()


class _Run:
    """Feeds lines to a session and asks its engine for the story of every request that ended."""

    def __init__(self, session: Session, lines: Lines) -> None:
        self._session, self._lines = session, lines
        self._running: dict[str, tuple[str, Submission]] = {}
        self.stories: list[Record] = []
        self._num_refused = self._num_failed = 0

    @property
    def code(self) -> int:
        """The exit code."""
        return WRONG_INPUT if self._num_refused else FAILED if self._num_failed else 0

    def feed(self) -> None:
        """Read lines while the engine can use more, and wait for one only when it has nothing to do."""
        session = self._session
        while not self._lines.ended and session.num_unfinished < session.max_unfinished:
            line = self._lines.next(wait=not session.num_unfinished)
            if line is None:
                return
            number, request = line
            if isinstance(request, str):
                self._refuse(number, f"line-{number}", request)
            else:
                self._queue(number, request)

    def _queue(self, number: int, request: BatchLine) -> None:
        from trivet.errors import RequestError
        from trivet_schemas.sampling import RequestOutputKind

        kind, name = RequestOutputKind.FINAL_ONLY, str(number)
        try:
            if request.messages is not None:
                submission = self._session.prepare_chat(name, request.messages, request.sampling, kind)
            else:
                prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
                submission = self._session.prepare(name, prompt, request.sampling, kind)
        except RequestError as error:
            self._refuse(number, request.id, str(error))
            return
        self._running[name] = request.id, submission
        self._session.queue(submission)

    def _refuse(self, number: int, name: str, problem: str) -> None:
        from trivet.launcher._stories import refused_story

        self._num_refused += 1
        complain(f"line {number}: {problem}")
        self.stories.append(refused_story(name, number, problem))

    def finish(self, output: RequestOutput) -> None:
        """Note the stories of a request that has ended."""
        from dataclasses import asdict

        if not output.finished:
            return
        name, submission = self._running.pop(output.request_id)
        if output.error is not None:
            self._num_failed += 1
            complain(f"line {output.request_id}: {output.error}")
        children = submission.child_ids
        for index, child in enumerate(children):
            timeline = self._session.engine.timeline(child)
            if timeline is not None:
                own = name if len(children) == 1 else f"{name}#{index}"
                self.stories.append(asdict(timeline) | {"request_id": own, "line": int(output.request_id)})
