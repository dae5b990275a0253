"""Turn pydantic's validation errors into problems with a path, the rule in words, the value and a suggestion."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trivet_schemas.errors import ConfigError, Problem, SchemaError, join_path, show, suggestion, unknown_name

Model = TypeVar("Model", bound=BaseModel)

_RULES: dict[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dataclass_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "frozen_field": "cannot be changed after construction",
    "frozen_instance": "cannot be changed after construction",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "invalid_key": "must be named by a string",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "mapping_type": "must be a mapping",
    "missing": "is required, and missing",
    "model_attributes_type": "must be a mapping",
    "model_type": "must be a mapping",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
}
_CHOICES = frozenset({"literal_error", "enum"})
_QUOTED = re.compile(r"'([^']*)'")
_SEQUENCES = (list, tuple, set, frozenset, Sequence)
_MAPPINGS = (dict, Mapping)


def validate_options(model: type[Model], options: Mapping[str, Any], path: str) -> Model:
    """Validate the options of one plugin (or any section) against the model that declares them.

    Args:
        model: The option model, usually a subclass of :class:`trivet_schemas.options.Options`.
        options: The keys and values as the user gave them.
        path: Where they stand in the configuration, ``plugins.cache``; it begins every problem's path.

    Raises:
        ConfigError: With every problem found.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as exc:
        raise ConfigError(format_validation_error(exc, path, model)) from None


def format_validation_error(
    exc: ValidationError,
    path_prefix: str = "",
    model: type[BaseModel] | None = None,
    *,
    noun: str = "key",
    remedies: Mapping[str, str] | None = None,
    hint: str = "",
) -> list[Problem]:
    """All problems of ``exc``: one per path, in the order pydantic found them.

    Args:
        exc: The error that a pydantic model raised.
        path_prefix: Put before every path.
        model: The model that was validated. With it, the tags that pydantic puts into locations for members of a union
            are left out of the paths, and an unknown key is compared with the known ones.
        noun: What messages call an unknown key.
        remedies: What to do instead, for keys that are known from elsewhere.
        hint: What follows the known names where an unknown key is near none of them.
    """
    rules: dict[str, list[str]] = {}
    inputs: dict[str, str] = {}
    nullable: set[str] = set()  # paths whose rules list what is allowed, though null is too
    problems: list[Problem | str] = []
    for error in exc.errors(include_url=False):
        names_a_key = error["type"] in {"extra_forbidden", "invalid_key"}
        parts, owners, annotations = _walk(model, error["loc"], names_a_key=names_a_key)
        path = join_path(path_prefix, *parts)
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, SchemaError):
            problems.extend(problem.under(path) for problem in cause.problems)
            continue
        if error["type"] == "extra_forbidden":
            known = [name for owner in owners for name in _key_names(owner)]
            problems.append(Problem(path, unknown_name(noun, error["loc"][-1], known, remedies=remedies, hint=hint)))
            continue
        if path not in rules:
            problems.append(path)
            rules[path] = []
            inputs[path] = _value_suffix(error)
        if error["type"] in _CHOICES and types.NoneType in annotations:
            nullable.add(path)
        rule = _rule(error)
        if rule not in rules[path]:
            rules[path].append(rule)
    found = [
        Problem(item, " or ".join(rules[item]) + (", or null" if item in nullable else "") + inputs[item])
        if isinstance(item, str)
        else item
        for item in problems
    ]
    # A value that fails as one member of a union within is of that kind: that it is no other kind helps nobody.
    around = {path[:dot] for path in (problem.path for problem in found) for dot in _dots(path)}
    return [problem for problem in found if problem.path not in rules or problem.path not in around]


def _dots(path: str) -> list[int]:
    return [position for position, letter in enumerate(path) if letter == "."]


def _rule(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind in _CHOICES:
        expected = str(context["expected"])
        near = suggestion(error["input"], _QUOTED.findall(expected)) if isinstance(error["input"], str) else None
        choice = f"must be one of {expected}" if " or " in expected else f"must be {expected}"
        return f"{choice} (did you mean {near!r}?)" if near else choice
    if kind in {"string_too_short", "too_short"}:
        unit = "characters" if kind == "string_too_short" else "items"
        least = context["min_length"]
        return "must not be empty" if least == 1 else f"must have at least {least} {unit}"
    if kind in _RULES:
        return _RULES[kind].format(**context)
    return error["msg"].replace("Input should", "must", 1)


def _value_suffix(error: ErrorDetails) -> str:
    """``, got VALUE``, unless the rule makes no use of the value or already shows it."""
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return ""
    text = show(value)
    if kind == "value_error":
        message = str(error.get("ctx", {}).get("error"))
        scalar = value is None or isinstance(value, str | int | float)
        return f", got {text}" if scalar and text not in message else ""
    if kind == "string_type" and isinstance(value, int | float):
        return f", got {text} (in YAML, put quotes around it)"
    return f", got {text}"


def _key_names(owner: type[BaseModel]) -> Iterator[str]:
    for name, field in owner.model_fields.items():
        yield field.alias or name


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation: unions are flattened, ``Annotated`` is taken off."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in {Union, types.UnionType}:
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def members(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without ``Annotated``: ``int | None`` has ``int`` and ``NoneType``."""
    return list(_members(annotation))


def _step(annotation: Any, item: str | int) -> Any:
    """The annotation of ``item`` inside ``annotation``, or None if it has no such place."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            if item in {name, field.alias}:
                return field.annotation
        return None
    origin = get_origin(annotation)
    if origin in _SEQUENCES and isinstance(item, int):
        return get_args(annotation)[0]
    if origin in _MAPPINGS and item != "[key]":
        return get_args(annotation)[1]
    return None


def _walk(
    model: type[BaseModel] | None, location: tuple[int | str, ...], *, names_a_key: bool
) -> tuple[list[str | int], list[Any], list[Any]]:
    """The path for a user, the models that own the last part of ``location``, which is a key or a union's tag, and the
    alternatives of what stands there."""
    if model is None:
        return [part for part in location if part != "[key]"], [], []
    here: list[Any] = [model]
    owners: list[Any] = []
    parts: list[str | int] = []
    for position, item in enumerate(location):
        models = [m for m in here if isinstance(m, type) and issubclass(m, BaseModel)]
        inner = [found for member in here if (found := _step(member, item)) is not None]
        if inner:
            parts.append(item)
            owners, here = models, [alternative for found in inner for alternative in _members(found)]
        elif names_a_key and position == len(location) - 1:
            parts.append(item)
            owners = models
    return parts, owners, here
