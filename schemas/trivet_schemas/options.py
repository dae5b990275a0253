"""What a plugin needs to declare its options: a base model, sizes in bytes, and aliases for flat arguments.

A plugin's options are one model, and the docstrings under the fields become their descriptions::

    class PagedOptions(Options):
        block_size: int = Field(16, ge=1, json_schema_extra=flat("block_size"))
        '''Tokens per block.'''
        memory: Size | None = None
        '''Memory for the blocks, in bytes; None takes what is left.'''
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from trivet_schemas._section import Section
from trivet_schemas.errors import ConfigError, Problem, show

KnownFlat = Mapping[str, list[tuple[str, str]]]
"""Flat argument name → the ``(role, option)`` pairs that it sets."""

_FLAT_KEY = "alias_of_flat"
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:(e\d{1,2})|([kmgtp]?)(i?)(b?))\s*", re.IGNORECASE | re.ASCII)
_SIZE_JSON_PATTERN = r"^\s*(\d+(\.\d*)?|\.\d+)\s*([eE]\d{1,2}|[kKmMgGtTpP]?[iI]?[bB]?)\s*$"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


class Options(Section):
    """Base of the option models of plugins: unknown options are refused, and options do not change."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> dict[str, Any]:
        from trivet_schemas._docstrings import add_descriptions

        schema = handler(core_schema)
        add_descriptions(cls, handler.resolve_ref_schema(schema))
        return schema


def flat(*names: str) -> dict[str, Any]:
    """``json_schema_extra`` of an option that a flat argument (``LLM(model, enable_prefix_caching=False)``) also sets.

    The same flat name may stand in several option models; then it sets the option in every role that declares it.
    """
    return {_FLAT_KEY: list(names)}


def collect_flat_names(
    providers: Mapping[str, Mapping[str, type[BaseModel] | None]],
) -> dict[str, list[tuple[str, str]]]:
    """The flat arguments that option models declare: name → ``[(role, option), ...]`` in order of role and provider.

    Args:
        providers: Role → provider name → its option model (None: it takes no options).

    Raises:
        ConfigError: If two providers of one role give a flat name to different options (which of them would be meant
            is open until a provider is selected), or a flat name is a key of the configuration itself.
    """
    from trivet_schemas.config import EngineConfig

    owners: dict[tuple[str, str], tuple[str, str]] = {}
    known: dict[str, list[tuple[str, str]]] = {}
    problems: list[Problem] = []
    for role, models in providers.items():
        for provider, model in models.items():
            for option, name in _declared(model):
                first = owners.setdefault((role, name), (provider, option))
                if name in EngineConfig.model_fields:
                    message = f"the flat name {name!r} of option {option!r} is a key of the configuration itself"
                    problems.append(Problem(f"{role}.{provider}", message))
                elif first[1] != option:
                    message = f"the flat name {name!r} sets {option!r} here, but {first[1]!r} in {role}.{first[0]}"
                    problems.append(Problem(f"{role}.{provider}", message))
                elif (role, option) not in known.setdefault(name, []):
                    known[name].append((role, option))
    if problems:
        raise ConfigError(problems)
    return known


def _declared(model: type[BaseModel] | None) -> list[tuple[str, str]]:
    """``(option, flat name)`` pairs of a model."""
    pairs: list[tuple[str, str]] = []
    for option, field in model.model_fields.items() if model is not None else ():
        extra = field.json_schema_extra
        names: Any = extra.get(_FLAT_KEY, []) if isinstance(extra, dict) else []
        pairs += [(option, name) for name in ([names] if isinstance(names, str) else names)]
    return pairs


def parse_size(value: float | str) -> int:
    """Bytes from ``4294967296``, ``"4GiB"``, ``"512MB"`` or ``"1.5G"``.

    ``KB``, ``MB``, ``GB``, ``TB``, ``PB`` are powers of 1000; ``KiB`` … ``PiB`` and the bare letters ``K`` … ``P`` are
    powers of 1024. Case and blanks before the unit make no difference. A fraction of a byte is cut off.

    Raises:
        ValueError: If ``value`` is not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"must not be negative, got {value}")
        return value
    if isinstance(value, float) and value >= 0 and value.is_integer():
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not isinstance(value, str) or match is None or (match[4] and not match[3]):
        raise ValueError(f"must be a number of bytes or a size like 4GiB, 512MB or 1.5G, got {show(value)}")
    from decimal import Context, Decimal

    number, exponent, letter, binary, byte = match.groups(default="")
    base = 1000 if byte and not binary else 1024
    exact = Context(prec=len(value) + 20 + int(exponent[1:] or 0))
    return int(exact.multiply(Decimal(number + exponent), Decimal(base ** _POWERS[letter.lower()])))


def format_size(size: int) -> str:
    """A size in the largest binary unit: ``4GiB``, ``1.5MiB``; a ``~`` says that it was cut, as in ``~1.33GiB``."""
    for letter in "PTGMK":
        unit = 1024 ** _POWERS[letter.lower()]
        if size >= unit:
            hundredths, rest = divmod(size * 100, unit)
            text = f"{hundredths // 100}.{hundredths % 100:02}".rstrip("0").rstrip(".")
            return f"{'~' if rest else ''}{text}{letter}iB"
    return f"{size}B"


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE_JSON_PATTERN}],
            "description": "bytes, or a size like 4GiB, 512MB, 1.5G",
        }
    ),
]
"""Bytes, given as a number or as text that :func:`parse_size` reads."""
