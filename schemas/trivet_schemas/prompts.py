"""The forms in which a prompt may be given."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from trivet_schemas.errors import ParameterError, Problem, show, unknown_name


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids; ``prompt``, the text they came from, is only shown in outputs."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]


PromptType = str | list[int] | TextPrompt | TokensPrompt
"""Whatever :func:`parse_prompt` accepts."""

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt in one form. ``token_ids`` is None if ``text`` has yet to be tokenised; otherwise the ids count."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    multi_modal_data: Mapping[str, Any] | None = None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the vocabulary of ``vocab_size`` tokens lacks.

        Raises:
            ParameterError: Naming the first such id and its position.
        """
        if self.token_ids is None or max(self.token_ids) < vocab_size:
            return
        position = next(i for i, token in enumerate(self.token_ids) if token >= vocab_size)
        rule = f"token ids must be below the vocabulary size {vocab_size}"
        raise ParameterError(Problem(f"prompt_token_ids.{position}", f"{rule}, got {self.token_ids[position]}"))


def parse_prompt(value: object) -> ParsedPrompt:
    """Bring one prompt into one form.

    Args:
        value: Text, a list (or one-dimensional array) of token ids, or a mapping with the keys of :class:`TextPrompt`
            or :class:`TokensPrompt`; a value of None is the same as a missing key.

    Raises:
        ParameterError: If the prompt is empty or has another shape, with every problem.
    """
    if isinstance(value, Mapping):
        return _parse_mapping(value)
    problems: list[Problem] = []
    if isinstance(value, str):
        parsed = ParsedPrompt(_text(value, "prompt", problems), None)
    elif isinstance(value, bytes):
        raise ParameterError(Problem("prompt", f"must be text, not bytes (decode it first), got {show(value)}"))
    elif _is_array(value) or isinstance(value, Sequence):
        parsed = ParsedPrompt(None, _token_ids(value, "prompt", problems))
    else:
        kinds = "must be text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"
        raise ParameterError(Problem("prompt", f"{kinds}, got {show(value)}"))
    if problems:
        raise ParameterError(problems)
    return parsed


def _parse_mapping(value: Mapping[Any, Any]) -> ParsedPrompt:
    given = {key: item for key, item in value.items() if item is not None}
    problems = [Problem(str(key), _unknown_key(key)) for key in given if key not in _KEYS]
    text = _text(given["prompt"], "prompt", problems) if "prompt" in given else None
    ids = _token_ids(given["prompt_token_ids"], "prompt_token_ids", problems) if "prompt_token_ids" in given else None
    if "prompt" not in given and "prompt_token_ids" not in given:
        problems.append(Problem("prompt", "one of 'prompt' and 'prompt_token_ids' must be given"))
    salt = given.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        problems.append(Problem("cache_salt", f"must be a non-empty string, got {show(salt)}"))
    elif salt is not None and not salt.isascii() and any("\ud800" <= letter <= "\udfff" for letter in salt):
        problems.append(Problem("cache_salt", f"must be valid Unicode, got {show(salt)} with half of a surrogate pair"))
    data = given.get("multi_modal_data")
    if data is not None and not isinstance(data, Mapping):
        problems.append(Problem("multi_modal_data", f"must be a mapping from modality to data, got {show(data)}"))
    if problems:
        raise ParameterError(problems)
    return ParsedPrompt(text, ids, salt, data)


def _unknown_key(key: object) -> str:
    if key in {"prompt_embeds", "prompt_embed"}:
        return "prompts cannot be given as embeddings here; give text ('prompt') or token ids ('prompt_token_ids')"
    return unknown_name("key", key, _KEYS)


def _text(value: object, path: str, problems: list[Problem]) -> str | None:
    if not isinstance(value, str):
        hint = "; give token ids as 'prompt_token_ids'" if isinstance(value, Sequence) else ""
        problems.append(Problem(path, f"must be a string, got {show(value)}{hint}"))
    elif not value:
        problems.append(Problem(path, "must not be empty, got ''"))
    else:
        return value
    return None


def _is_array(value: object) -> bool:
    return hasattr(value, "tolist") and hasattr(value, "ndim")


def _token_ids(value: Any, path: str, problems: list[Problem]) -> list[int] | None:
    found = len(problems)
    if _is_array(value):
        if value.ndim != 1:
            problems.append(Problem(path, f"must be one-dimensional, got an array of {value.ndim} dimensions"))
            return None
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        problems.append(Problem(path, f"must be a list of token ids, got {show(value)}"))
        return None
    if not len(value):
        problems.append(Problem(path, "must have at least one token, got []"))
        return None
    ids: list[int] = []
    for position, item in enumerate(value):
        token = item if type(item) is int else _as_index(item)
        if token is None or token < 0:
            problems.append(Problem(f"{path}.{position}", _wrong_item(item)))
            break  # a long list of the wrong kind would repeat the same message
        ids.append(token)
    return ids if len(problems) == found else None


def _as_index(item: object) -> int | None:
    if isinstance(item, bool):
        return None
    try:
        return operator.index(item)  # type: ignore[arg-type]  # any object is asked; those without __index__ raise
    except TypeError:
        return None


def _wrong_item(item: object) -> str:
    rule = "must be a token id (an integer, not negative)"
    if isinstance(item, str | Sequence | Mapping):
        return f"{rule}, got {show(item)}; this looks like several prompts: give each one by itself"
    return f"{rule}, got {show(item)}"
