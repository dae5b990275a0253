"""Constraints on the shape of the output: JSON schema, regular expression, choice, grammar or structural tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trivet_schemas.errors import ParameterError, Problem, show, unknown_name


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the output must match; exactly one field is given. The grammar provider checks the constraint itself.

    Raises:
        ParameterError: If no field or several are given, or one has the wrong shape.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as a mapping or as JSON text."""
    regex: str | None = None
    """A regular expression for the whole output."""
    choice: list[str] | None = None
    """The texts of which the output is one."""
    grammar: str | None = None
    """A context-free grammar (Lark or EBNF)."""
    json_object: bool | None = None
    """Any JSON object; False is the same as not given."""
    structural_tag: str | dict[str, Any] | None = None
    """Tags between which the output is constrained, as a mapping or as JSON text."""

    def __post_init__(self) -> None:
        given = self._given()
        problems: list[Problem] = []
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            problems.append(Problem("", f"exactly one of {names} must be given, got {', '.join(given) or 'none'}"))
        for name in given:
            message = _CHECKS[name](getattr(self, name))
            if message is not None:
                problems.append(Problem(name, f"{message}, got {show(getattr(self, name))}"))
        if problems:
            raise ParameterError(problems)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """Make it from keys and values of a request.

        Raises:
            ParameterError: If a key is unknown, or as the class.
        """
        names = [f.name for f in fields(cls)]
        unknown = [Problem(str(key), unknown_name("field", key, names)) for key in values if key not in names]
        if unknown:
            raise ParameterError(unknown)
        return cls(**values)

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return [name for name, value in values.items() if value is not None and value is not False]


def _check_text(value: object) -> str | None:
    return None if isinstance(value, str) and value else "must be a non-empty string"


def _check_json(value: object) -> str | None:
    if isinstance(value, str):
        import json

        try:
            value = json.loads(value)
        except ValueError as exc:
            return f"is not valid JSON ({exc})"
    if isinstance(value, dict | bool):
        return None
    return "must be a mapping or JSON text of an object"


def _check_choice(value: object) -> str | None:
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) and item for item in value):
        return None
    return "must be a non-empty list of non-empty strings"


_CHECKS = {
    "json": _check_json,
    "regex": _check_text,
    "choice": _check_choice,
    "grammar": _check_text,
    "json_object": lambda value: None if value is True else "must be true or false",
    "structural_tag": _check_json,
}
