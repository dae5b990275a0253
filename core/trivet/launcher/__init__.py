"""The command ``trivet``. Importing this package costs nothing; a command imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 1: something failed while it ran. 2: wrong input, with a message that says what to change.
    130: interrupted. 141: the reader of the output went away.

    Args:
        arguments: Without the program's name; None takes ``sys.argv``.
    """
    from trivet.launcher.app import run

    return run(arguments)
