"""Plain columns on stdout: whole words, whatever the width of the terminal, so that ``grep`` finds them."""

from __future__ import annotations

from collections.abc import Sequence

import typer

_GAP = "  "


def heading(text: str) -> None:
    """A title over what follows."""
    typer.echo(typer.style(text, bold=True))


def columns(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> None:
    """Rows of cells, aligned; the last column is not padded."""
    if not rows:
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        typer.echo((indent + _GAP.join([*cells, row[-1]])).rstrip())
