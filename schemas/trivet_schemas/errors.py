"""Errors about configurations, parameters, prompts and batch lines, and helpers that word them.

This module imports neither pydantic nor anything else that is slow to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

_MAX_SHOWN = 80
_MAX_LISTED = 64


class Place(NamedTuple):
    """Where a value was written: a line of the file (from 1), or the text of a ``--set``."""

    line: int | None = None
    override: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with what a user gave.

    ``path`` is the dotted place (``plugins.cache.block_size``), empty for the whole; ``message`` states the rule, the
    value and, where there is one, the remedy. ``line`` (from 1) or ``override`` (the text of a ``--set``) say where the
    value was written, when that is known.
    """

    path: str
    message: str
    line: int | None = None
    override: str | None = None

    def __str__(self) -> str:
        if self.override is not None:
            place = f" (from --set {self.override})"
        elif self.line is not None:
            place = f" (line {self.line})"
        else:
            place = ""
        if not self.path:
            return self.message + place
        return f"{self.path}{place}: {self.message}"

    def under(self, prefix: str) -> Problem:
        """The same problem, with ``prefix`` put before its path."""
        return replace(self, path=join_path(prefix, self.path))

    def at(self, place: Place) -> Problem:
        """The same problem, written at ``place`` unless it already knows its own."""
        if self.line is not None or self.override is not None:
            return self
        return replace(self, line=place.line, override=place.override)


class SchemaError(ValueError):
    """Base of the errors of this package. ``problems`` holds every problem found, not only the first."""

    exit_code = 2
    _heading = "problems"

    def __init__(self, problems: str | Problem | Iterable[Problem], source: str | None = None) -> None:
        if isinstance(problems, str):
            problems = (Problem("", problems),)
        elif isinstance(problems, Problem):
            problems = (problems,)
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        prefix = f"{self.source}: " if self.source else ""
        if len(self.problems) == 1:
            return f"{prefix}{self.problems[0]}"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{prefix}{len(self.problems)} {self._heading}:\n{lines}"


class ParameterError(SchemaError):
    """Sampling or pooling parameters, a prompt or a batch line break a rule; the request is refused."""

    _heading = "problems with the request"


class ConfigError(SchemaError):
    """A configuration cannot be used. ``source`` is the file it came from, None if it was made in Python."""

    _heading = "problems in the configuration"


def join_path(*parts: str | int) -> str:
    """Dotted path of the non-empty parts: ``join_path("plugins", "cache_tier", 0)`` is ``plugins.cache_tier.0``."""
    return ".".join(str(part) for part in parts if part != "")


def show(value: object) -> str:
    """``value`` for a message: its repr, cut in the middle when it is long."""
    text = repr(value)
    if len(text) <= _MAX_SHOWN:
        return text
    half = (_MAX_SHOWN - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def suggestion(name: object, known: Iterable[str]) -> str | None:
    """The member of ``known`` that a misspelt ``name`` most likely meant, or None if nothing is near."""
    from difflib import get_close_matches

    by_folded = {word.lower().replace("-", "_"): word for word in known}
    folded = str(name).lower().replace("-", "_")
    matches = get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def unknown_name(
    kind: str, name: object, known: Iterable[str], *, remedies: Mapping[str, str] | None = None, hint: str = ""
) -> str:
    """Message for a name that is not in ``known``: ``unknown KIND 'NAME'; did you mean 'X'?`` or the known names.

    ``remedies`` says for certain names what to do instead; ``hint`` follows where no known name is near."""
    known = sorted(known)
    if remedies and isinstance(name, str) and name in remedies:
        return f"unknown {kind} {show(name)}; {remedies[name]}"
    near = suggestion(name, known)
    if near is not None:
        return f"unknown {kind} {show(name)}; did you mean {near!r}?"
    if not known:
        return f"unknown {kind} {show(name)}; none is accepted here"
    listed = ", ".join(known[:_MAX_LISTED]) + (", ..." if len(known) > _MAX_LISTED else "")
    return f"unknown {kind} {show(name)}; known: {listed}" + (f"; {hint}" if hint else "")
