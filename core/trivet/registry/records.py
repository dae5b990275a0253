"""What the registry knows about a plugin: where it comes from, its hooks, what it offers, what is wrong with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from trivet.provider import Component, Provider
from trivet.roles.base import Role


class Origin(Enum):
    """Where a plugin comes from."""

    BUNDLED = "bundled"  #: an entry point of the distribution ``trivet``; its providers can always be selected
    INSTALLED = "installed"  #: an entry point of another distribution; active only when the configuration names it
    OBJECT = "object"  #: given to ``Engine(config, plugins=[...])``; always active
    EXTENSION = "extension"  #: built by ``trivet_extend`` of an active plugin


@dataclass(frozen=True, slots=True)
class HookImpl:
    """One function that carries ``trivet.hookspecs.hookimpl``. ``arguments`` are the names it takes, in its order."""

    hook: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    wrapper: bool
    tryfirst: bool
    trylast: bool
    optional: bool
    place: str  #: ``file:line``


@dataclass(eq=False, slots=True)
class Plugin:
    """A discovered plugin. ``target`` is its module or object, None when the import failed (``failure`` says how).

    ``problems`` holds everything that is wrong with it; they stop an engine that uses the plugin, and no other.
    """

    name: str
    origin: Origin
    target: Any = None
    distribution: str | None = None
    version: str | None = None
    file: str | None = None
    entry_point: str | None = None
    failure: str | None = None
    problems: list[str] = field(default_factory=list)
    hooks: list[HookImpl] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    rejected: set[tuple[str, str]] = field(default_factory=set)
    """``(role, name)`` of providers whose descriptor is wrong."""
    components: list[Component] = field(default_factory=list)
    specs: list[Any] = field(default_factory=list)

    @property
    def label(self) -> str:
        """``plugin 'x' (acme 1.2, /path/plugin.py)``, for messages."""
        where = [f"{self.distribution} {self.version}"] if self.distribution else []
        where += [self.file] if self.file else []
        text = f"plugin {self.name!r}"
        return f"{text} ({', '.join(where)})" if where else text

    @property
    def extends(self) -> bool:
        """Whether it does anything besides offering providers and components."""
        return any(impl.hook not in {"trivet_providers", "trivet_components"} for impl in self.hooks)

    def implements(self, hook: str) -> HookImpl | None:
        """The implementation of ``hook``, None if there is none."""
        return next((impl for impl in self.hooks if impl.hook == hook), None)

    def report(self, message: str) -> None:
        """Record a problem, with the plugin's name before it."""
        text = f"{self.label}: {message}"
        if text not in self.problems:
            self.problems.append(text)


@dataclass(frozen=True, slots=True)
class Offer:
    """A provider of a role: a descriptor, or the very object that an embedder passed."""

    role: str
    name: str
    plugin: Plugin
    provider: Provider | None = None
    instance: Role | None = None

    @property
    def is_object(self) -> bool:
        """Whether an embedder passed it, so that it serves its role unless the configuration names another."""
        return self.plugin.origin is Origin.OBJECT

    @property
    def label(self) -> str:
        """``provider 'paged' of plugin 'paged' (trivet 0.1.0, /path/plugin.py)``, for messages."""
        return f"provider {self.name!r} of {self.plugin.label}"


def file_of(target: object) -> str | None:
    """The source file of a module, or of an object's class; None when there is none (a class typed into a shell)."""
    if isinstance(target, ModuleType):
        return getattr(target, "__file__", None)
    cls = target if inspect.isclass(target) else type(target)
    try:
        return inspect.getsourcefile(cls)
    except TypeError:
        return None


def place_of(function: Callable[..., Any]) -> str:
    """``file:line`` of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def listed(names: Sequence[str]) -> str:
    """``'a', 'b'``, or ``none``."""
    return ", ".join(repr(name) for name in names) if names else "none"
