"""Import what descriptors name, and say clearly why when it does not work."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trivet.errors import PluginError
from trivet.roles import ROLE_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

    from trivet.registry.records import Offer, Plugin
    from trivet.result import Reducer

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(path: object) -> bool:
    """Whether ``path`` has the form ``package.module:name``."""
    return isinstance(path, str) and _PATH.fullmatch(path) is not None


def load(path: str, what: str) -> Any:
    """Import ``package.module:name``. Raises :class:`PluginError` that begins with ``what``."""
    if not is_import_path(path):
        raise PluginError(f"{what} {path!r} is not of the form 'package.module:name'")
    module_name, _, attributes = path.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as exc:
        raise PluginError(f"{what} {path!r} cannot be imported: {type(exc).__name__}: {exc}") from exc
    for attribute in attributes.split("."):
        try:
            target = getattr(target, attribute)
        except AttributeError:
            raise PluginError(f"{what} {path!r}: module {module_name!r} has no {attributes!r}") from None
    return target


def missing_requirements(offer: Offer) -> list[str]:
    """A remedy per module that the provider needs and that is not installed."""
    provider, plugin = offer.provider, offer.plugin
    if provider is None:
        return []
    distribution = plugin.distribution or "trivet"
    return [
        f"needs the module {module!r}, which is not installed: pip install "
        + (f'"{distribution}[{extra}]"' if extra else distribution)
        for module, extra in provider.requires.items()
        if not _is_installed(module)
    ]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the parent of a dotted name is missing, or the module has no spec
        return False


def load_factory(offer: Offer) -> Callable[..., Any]:
    """The factory of a descriptor, checked as far as possible without calling it.

    Raises:
        PluginError: The path does not import, or the class is not one of the role's, leaves methods abstract, or
            cannot be called as ``factory(context, options)``.
    """
    provider = offer.provider
    if provider is None:
        raise ValueError("an object passed by an embedder has no factory")
    if missing := missing_requirements(offer):
        raise PluginError([f"{offer.label} {problem}" for problem in missing])
    factory = load(provider.factory, f"{offer.label}: factory")
    problems = []
    expected = ROLE_CLASSES[offer.role]
    if inspect.isclass(factory):
        if not issubclass(factory, expected):
            problems.append(f"must be derived from trivet.roles.{expected.__name__}, as role {offer.role!r} requires")
        elif inspect.isabstract(factory):
            missing_methods = ", ".join(sorted(factory.__abstractmethods__))
            problems.append(f"does not implement {missing_methods} of trivet.roles.{expected.__name__}")
    elif not callable(factory):
        problems.append(f"is {factory!r}, which cannot be called")
    if not problems and (misfit := _call_problem(factory)):
        problems.append(misfit)
    if problems:
        raise PluginError([f"{offer.label}: factory {provider.factory!r} {problem}" for problem in problems])
    return factory  # type: ignore[no-any-return]


def load_reducers(offer: Offer) -> dict[str, Reducer]:
    """The reducers that a descriptor names. Raises :class:`PluginError` for the first that does not import."""
    paths = offer.provider.reducers if offer.provider is not None else {}
    return {name: load(path, f"{offer.label}: reducer {name!r}") for name, path in paths.items()}


def load_worker_factory(offer: Offer) -> Callable[..., Any] | None:
    """What makes the worker half of a connector or tier, None if it has none. Raises :class:`PluginError`."""
    path: Any = offer.provider.worker_factory if offer.provider else getattr(offer.instance, "worker_factory", None)
    factory: Callable[..., Any] | None = load(path, f"{offer.label}: worker_factory") if isinstance(path, str) else path
    return factory


def import_problems(offer: Offer, *, worker_half: bool = True) -> list[str]:
    """Everything that importing what a descriptor names brings to light.

    ``worker_half`` False leaves out what only workers import.
    """
    problems = [*problems_of(load_factory, offer), *problems_of(load_reducers, offer)]
    return problems + problems_of(load_worker_factory, offer) if worker_half else problems


def problems_of(function: Callable[..., object], *arguments: object) -> list[str]:
    """The problems of the :class:`PluginError` that a call raises; none if it succeeds."""
    try:
        function(*arguments)
    except PluginError as exc:
        return exc.problems
    return []


def _call_problem(factory: Callable[..., Any]) -> str | None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # built in C without a signature: the call itself will tell
        return None
    try:
        signature.bind(object(), object())
    except TypeError as exc:
        return f"is called as factory(context, options), but takes {signature}: {exc}"
    return None


def load_options_model(declared: Any, plugin: Plugin, where: str) -> type[BaseModel] | None:
    """The option model that a descriptor declares, None if it takes no options. Raises :class:`PluginError`."""
    if declared is None:
        return None
    from trivet_schemas.options import Options

    model = load(declared, f"{plugin.label}: options of {where}") if isinstance(declared, str) else declared
    if not (inspect.isclass(model) and issubclass(model, Options)):
        raise PluginError(
            f"{plugin.label}: options of {where} must be a subclass of trivet_schemas.options.Options, got {model!r}"
        )
    return model
