"""Names in messages."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_NAMES = 8


def listed(names: Iterable[str]) -> str:
    """The first few of ``names`` in quotes, sorted, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(repr(name) for name in ordered[:_MAX_NAMES])
    more = len(ordered) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
