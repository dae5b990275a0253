"""``trivet generate``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trivet.launcher.errors import FAILED, WRONG_INPUT, complain
from trivet.launcher.options import ConfigArgument, JsonOption, SetOption, read_config

if TYPE_CHECKING:
    from trivet.launcher._printing import Printer
    from trivet.launcher._progress import RequestProgress
    from trivet.launcher._session import Session
    from trivet.submission import Submission
    from trivet_schemas.config import EngineConfig
    from trivet_schemas.sampling import RequestOutputKind, SamplingParams

_FEW = 4


def generate(
    config: ConfigArgument,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be repeated.", show_default=False),
    ] = None,
    input_: Annotated[
        str | None,
        typer.Option("--input", "-i", metavar="FILE", help="Requests, one JSON object per line; - is stdin."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where the results of --input go; by default stdout (-)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run: skip what --output holds already.")
    ] = False,
    as_json: JsonOption = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Short for --set generate.sampling.max_tokens=N.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Short for --set generate.sampling.temperature=T.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Generate text for prompts, or for a file of requests.

    Without --prompt and --input, the prompts of the file's `generate` section run. Results appear in the order of the
    prompts; with several of them, each follows its prompt. --json prints one object per line instead.

    --input takes one JSON object per line: `prompt` (text), `prompt_token_ids` or `messages` (a conversation), an `id`
    if wanted, and sampling parameters, beside these or under `sampling`. The output has one object per line, written
    as soon as the request ends: `id`, `line` (its number in the input), `outputs` and `usage`, or `error`. A line
    that is wrong gets an `error`, and the others go on.

    An interrupted run keeps what it finished. --resume skips ids that are done, cuts off an incomplete last line and
    tries lines with an error again; without it, an existing output file is refused.

    Exit code: 0; 1 if a request failed while it ran; 2 if a request was refused or anything else in the input is wrong.
    """
    if prompt and input_ is not None:
        raise typer.BadParameter("give either --prompt or --input", param_hint="--prompt")
    if input_ is None and (output is not None or resume):
        raise typer.BadParameter("goes with --input", param_hint="--output" if output is not None else "--resume")
    settings = read_config(config, set_)
    shorthands = {"max_tokens": max_tokens, "temperature": temperature}
    changes = {name: value for name, value in shorthands.items() if value is not None}
    sampling = settings.generate.sampling.replace(**changes)
    if input_ is not None:
        from trivet.launcher._batch import PIPE, generate_batch

        bar = not as_json
        code = generate_batch(settings, sampling, input_, output or PIPE, resume=resume, bar=bar)
    else:
        code = _generate_prompts(settings, sampling, prompt or settings.generate.prompts, as_json=as_json)
    raise typer.Exit(code)


def _generate_prompts(config: EngineConfig, sampling: SamplingParams, prompts: list[str], *, as_json: bool) -> int:
    from trivet.launcher._printing import JsonPrinter, TextPrinter
    from trivet.launcher._progress import RequestProgress
    from trivet.launcher._session import Session
    from trivet_schemas.sampling import RequestOutputKind

    if not prompts:
        complain(f"there is no prompt: give --prompt or --input, or put some under generate.prompts in {config.source}")
        return WRONG_INPUT
    kind = RequestOutputKind.FINAL_ONLY if as_json else RequestOutputKind.DELTA
    with Session(config) as session:
        for submission in _prepare(session, prompts, sampling, kind, chat=config.generate.chat):
            session.queue(submission)
        printer = JsonPrinter(prompts) if as_json else TextPrinter(prompts, sampling.n)
        # Text that appears on the same terminal shows the progress itself.
        shown = len(prompts) > _FEW and not as_json and not sys.stdout.isatty()
        with RequestProgress(len(prompts), shown=shown) as bar:
            _run(session, printer, bar)
        if sys.stderr.isatty() and not as_json:
            complain(f"{printer.num_tokens} tokens in {bar.seconds:.1f} s", kind="done")
    return FAILED if printer.failed else 0


def _prepare(
    session: Session, prompts: list[str], sampling: SamplingParams, kind: RequestOutputKind, *, chat: bool
) -> list[Submission]:
    """All requests, or an error that names the prompt; then nothing has run."""
    from trivet.errors import RequestError

    submissions = []
    for index, prompt in enumerate(prompts):
        try:
            if chat:
                messages = [{"role": "user", "content": prompt}]
                submissions.append(session.prepare_chat(str(index), messages, sampling, kind))
            else:
                submissions.append(session.prepare(str(index), prompt, sampling, kind))
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompt {index + 1} of {len(prompts)}: {error}", param=error.param) from None
    return submissions


def _run(session: Session, printer: Printer, bar: RequestProgress) -> None:
    from trivet.batch import deferred_interrupt

    with deferred_interrupt() as check_interrupt:
        while session.num_unfinished:
            for output in session.step():
                printer.add(output)
                if output.finished:
                    bar.advance()
            check_interrupt()
