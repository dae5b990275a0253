"""Descriptors that plugins return: what they offer, without importing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivet.context import Context

#: (major, minor) of the plugin interface, see docs/plugins.md for the deprecation policy
API_VERSION = (1, 0)


@dataclass(frozen=True, slots=True)
class Suitability:
    """An answer to ``use: auto``: the highest rank wins, a tie is an error; ``rank`` None means it cannot serve."""

    rank: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Provider:
    """Offers one implementation of a role.

    ``factory`` is ``"package.module:Class"`` (imported only when selected) and is called as ``factory(context,
    options)``; ``options`` is ``"package.module:Model"`` or a pydantic model class derived from
    ``trivet_schemas.options.Options``. ``api`` is the interface version it was written for, ``(major, minor)``.
    ``requires`` maps an importable module to the extra that brings it, empty where the distribution itself does."""

    role: str
    name: str
    factory: str
    options: Any = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    api: tuple[int, int] = (1, 0)
    #: answers ``use: auto``; None: never chosen automatically unless it is the role's only bundled provider
    suits: Callable[[Context], Suitability] | None = None
    #: for connectors and tiers: ``"package.module:Class"`` of the worker half, called as ``(context, options)``
    worker_factory: str | None = None
    requires: Mapping[str, str] = field(default_factory=dict)
    #: reducers of result extensions over ranks: name → ``"package.module:function"``
    reducers: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Component:
    """A small named part, such as a scheduling policy; ``factory`` is ``"package.module:name"``, called with the
    chooser's keywords."""

    kind: str
    name: str
    factory: str
    api: tuple[int, int] = (1, 0)
    summary: str = ""
