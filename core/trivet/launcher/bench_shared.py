"""What the commands under ``trivet bench`` share: files, progress, tables, and the arguments of engines as flags."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trivet.launcher._tables import heading

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="Hub id, folder, GGUF file or demo; instead of the file's.", show_default=False
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", min=0, help="Of the prompts and of sampling; by default the configuration's.", show_default=False
    ),
]
OutputJsonOption = Annotated[
    Path | None, typer.Option("--output-json", metavar="FILE", help="Write the results as JSON.", show_default=False)
]
DisableDetokenizeOption = Annotated[
    bool, typer.Option("--disable-detokenize", help="Make no text of the tokens: do not measure that.")
]


def check_path(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the time for a benchmark is spent."""
    if path is None:
        return
    problem = f"{path} cannot be written: name a file in a folder that exists"
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(problem, param_hint=option)
    if not path.exists():
        # There are folders that nobody can make files in.
        try:
            path.touch()
            path.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{problem} ({error.strerror})", param_hint=option) from error


def progress_bar() -> Any:
    """A ``rich.progress.Progress`` on stderr, hidden where nobody sees it and gone when it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def set_completed(bar: Any, task: Any, count: int) -> None:
    """Show that ``count`` of a task are done."""
    bar.update(task, completed=count)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as a JSON file."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def counting(bar: Any, name: str, total: int) -> Callable[[], None]:
    """Add a task to a bar; the function returned says that one more is done."""
    task = bar.add_task(name, total=total)

    def advance() -> None:
        bar.advance(task)

    return advance


def show_table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """A table on stdout; all columns but the first are figures."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    heading(title)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, text in enumerate(headings):
        table.add_column(text, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout).print(table)
