"""Results of prompts on stdout, in the order of the prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from trivet.launcher._records import result_record, to_line
from trivet.launcher.errors import complain

if TYPE_CHECKING:
    from trivet_schemas.outputs import RequestOutput


@dataclass(slots=True)
class _State:
    """A request: pieces of text per output that were not written yet, and its last output when it has ended."""

    pieces: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    begun: bool = False
    last: RequestOutput | None = None


class Printer:
    """Takes the outputs of requests, whose ids are the indices of ``prompts``, and prints them in that order."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._states = [_State() for _ in prompts]
        self._head = 0  # all before it are printed
        self.failed = False
        self.num_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Note what a step added to a request, and print what can be printed."""
        state = self._states[int(output.request_id)]
        for completion in output.outputs:
            state.pieces[completion.index].append(completion.text)
            self.num_tokens += len(completion.token_ids)
        if output.finished:
            state.last = output
            self.failed = self.failed or output.error is not None
        while self._head < len(self._states) and self._print(self._head, self._states[self._head]):
            self._head += 1

    def _print(self, index: int, state: _State) -> bool:
        """Print what there is of a request; whether that was all."""
        raise NotImplementedError


class JsonPrinter(Printer):
    """One JSON object per request; it needs outputs of the kind ``final``."""

    def _print(self, index: int, state: _State) -> bool:
        if state.last is None:
            return False
        typer.echo(to_line(result_record(str(index), state.last, prompt=self._prompts[index])))
        return True


class TextPrinter(Printer):
    """Text as it grows; with several prompts, each after its prompt. It needs outputs of the kind ``delta``."""

    def __init__(self, prompts: Sequence[str], n: int) -> None:
        """``n`` is the number of outputs per prompt."""
        super().__init__(prompts)
        self._n = n

    def _print(self, index: int, state: _State) -> bool:
        if not state.begun and (state.pieces or state.last is not None):
            self._begin(index)
            state.begun = True
        if self._n == 1:
            typer.echo("".join(state.pieces.pop(0, [])), nl=False)
        if state.last is None:
            return False
        if self._n == 1:
            typer.echo()
        else:
            for number in range(self._n):
                typer.echo(f"[{number + 1}]{''.join(state.pieces[number])}")
        if state.last.error is not None:
            complain(f"prompt {index + 1} of {len(self._prompts)}: {state.last.error}")
        return True

    def _begin(self, index: int) -> None:
        if len(self._prompts) == 1:
            return
        if index:
            typer.echo()
        for line in self._prompts[index].splitlines() or [""]:
            typer.echo(typer.style(f"> {line}", bold=True))
