"""What all roles share, and how many providers each role takes."""

from __future__ import annotations

from abc import ABC
from enum import Enum
from typing import ClassVar


class Cardinality(Enum):
    """How many providers of a role an engine has."""

    ONE = "one"  #: exactly one, `use: auto` picks it
    OPTIONAL = "optional"  #: none or one
    MANY = "many"  #: a list, in the order of the configuration
    PER_REQUEST = "per request"  #: a list; a request picks one (or none)


class Side(Enum):
    """Where a role's object lives. In one process with the `inline` executor; apart with all others."""

    ENGINE = "engine"
    WORKER = "worker"


class Role(ABC):
    """Base of every provider object."""

    role: ClassVar[str]

    def check_integrity(self) -> None:
        """Raise AssertionError when internal state contradicts itself; called by tests and when the engine is idle."""

    def shutdown(self) -> None:
        """Release everything held; called once, also after a failed start; must not raise for a half-built object."""


CARDINALITY: dict[str, Cardinality] = {
    "scheduler": Cardinality.ONE,
    "cache": Cardinality.ONE,
    "cache_tier": Cardinality.MANY,
    "executor": Cardinality.ONE,
    "runner": Cardinality.ONE,
    "model": Cardinality.ONE,
    "attention": Cardinality.ONE,
    "quantization": Cardinality.OPTIONAL,
    "sampler": Cardinality.ONE,
    "logits_processor": Cardinality.MANY,
    "grammar": Cardinality.PER_REQUEST,
    "drafter": Cardinality.PER_REQUEST,
    "connector": Cardinality.OPTIONAL,
    "tokenizer": Cardinality.ONE,
    "frontend": Cardinality.MANY,
}

ROLE_SIDES: dict[str, Side] = {
    role: Side.WORKER
    if role in {"runner", "model", "attention", "quantization", "sampler", "logits_processor", "grammar", "drafter"}
    else Side.ENGINE
    for role in CARDINALITY
}
