"""Read the lines of a JSONL file of requests, as ``trivet generate --input`` takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trivet_schemas.errors import ParameterError, Problem, show, unknown_name
from trivet_schemas.prompts import parse_prompt
from trivet_schemas.sampling import EXTRA_HINT, MOVED_FIELDS, SamplingParams

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_OWN_KEYS = ("id", *_PROMPT_KEYS, "sampling")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. Exactly one of ``prompt``, ``prompt_token_ids`` and ``messages`` is not None."""

    id: str
    """As given (a number becomes text), else ``line-N`` with the number of the line."""
    sampling: SamplingParams
    """The defaults, changed by what the line says."""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    """A conversation: mappings with ``role`` and ``content``."""

    @classmethod
    def from_mapping(cls, values: dict[str, Any], number: int, defaults: SamplingParams | None = None) -> BatchLine:
        """Make it from the object of line ``number``.

        Sampling parameters stand beside the prompt or under ``sampling``; null is the same as a missing key, except
        under ``sampling``, where ``max_tokens: null`` is a value.

        Raises:
            ParameterError: With every problem of the line.
        """
        given = {key: value for key, value in values.items() if value is not None}
        problems: list[Problem] = []
        sampling = _sampling(given, defaults or SamplingParams(), problems)
        prompt = _prompt(given, problems)
        name = given.get("id", f"line-{number}")
        if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
            problems.append(Problem("id", f"must be a non-empty string or an integer, got {show(name)}"))
        if problems or sampling is None:
            raise ParameterError(problems)
        return cls(str(name), sampling, **prompt)


def parse_batch_lines(
    lines: Iterable[str | bytes], defaults: SamplingParams | None = None
) -> Iterator[tuple[int, BatchLine | str]]:
    """Parse the lines of a file one by one, lazily; a wrong line does not stop the others.

    Args:
        lines: The lines, as an open file yields them. Bytes must be UTF-8; blank lines are skipped.
        defaults: Sampling parameters that a line may change.

    Yields:
        ``(line number from 1, request)``, or the text of what is wrong in its place. An id that an earlier line had is
        wrong, since results are told apart by it.
    """
    seen: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        try:
            text = raw.decode() if isinstance(raw, bytes) else raw
        except UnicodeDecodeError as exc:
            yield number, f"is not UTF-8 text (byte {exc.start})"
            continue
        if number == 1:
            text = text.removeprefix("\ufeff")
        if not text.strip():
            continue
        try:
            line = BatchLine.from_mapping(_object(text), number, defaults)
        except ParameterError as exc:
            yield number, "; ".join(str(problem) for problem in exc.problems)
            continue
        first = seen.setdefault(line.id, number)
        yield number, line if first == number else f"id: {line.id!r} is the id of line {first} already"


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as exc:
        raise ParameterError(f"not valid JSON at column {exc.colno}: {exc.msg}: {show(text.strip())}") from None
    except RecursionError:
        raise ParameterError("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ParameterError(f'must be an object like {{"prompt": "..."}}, got {show(value)}')
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ParameterError(Problem(twice, "is given twice; keep one"))
    return values


def _no_constant(name: str) -> Any:
    raise ParameterError(f"not valid JSON: {name} is no JSON number")


def _sampling(given: dict[str, Any], defaults: SamplingParams, problems: list[Problem]) -> SamplingParams | None:
    fields = SamplingParams.model_fields
    changes = {key: value for key, value in given.items() if key in fields}
    known = [*_OWN_KEYS, *fields]
    problems += [
        Problem(key, unknown_name("key", key, known, remedies=MOVED_FIELDS, hint=EXTRA_HINT))
        for key in given
        if key not in known
    ]
    nested = given.get("sampling", {})
    prefixes = dict.fromkeys(changes, "")
    if isinstance(nested, dict):
        problems += [
            Problem(key, "is given twice, by itself and under 'sampling'; keep one") for key in nested if key in changes
        ]
        changes |= nested
        prefixes |= dict.fromkeys(nested, "sampling")
    else:
        problems.append(Problem("sampling", f"must be an object of sampling parameters, got {show(nested)}"))
    try:
        return defaults.replace(**changes)
    except ParameterError as exc:
        problems += [problem.under(prefixes.get(problem.path.partition(".")[0], "")) for problem in exc.problems]
        return None


def _prompt(given: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    names = [key for key in _PROMPT_KEYS if key in given]
    if len(names) != 1:
        found = " and ".join(names) or "none"
        problems.append(Problem("", f"exactly one of {', '.join(_PROMPT_KEYS)} must be given, got {found}"))
        return {}
    if names == ["messages"]:
        return {"messages": _messages(given["messages"], problems)}
    try:
        parsed = parse_prompt({names[0]: given[names[0]]})
    except ParameterError as exc:
        problems += exc.problems
        return {}
    return {"prompt": parsed.text, "prompt_token_ids": parsed.token_ids}


def _messages(value: Any, problems: list[Problem]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        rule = "must be a non-empty list of messages with 'role' and 'content'"
        problems.append(Problem("messages", f"{rule}, got {show(value)}"))
        return []
    for index, message in enumerate(value):
        path = f"messages.{index}"
        if not isinstance(message, dict):
            problems.append(Problem(path, f"must be an object with 'role' and 'content', got {show(message)}"))
            continue
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            problems.append(Problem(f"{path}.role", f"must be a string like 'user', got {show(role)}"))
        if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
            problems.append(Problem(f"{path}.content", f"must be a string or a list of parts, got {show(content)}"))
    return value
