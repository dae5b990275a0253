"""Validation of hook implementations, over static attributes: no code of a plugin runs, and all problems are reported.

pluggy checks less: it accepts a misspelt argument that has a default (and never fills it), ignores keyword-only
arguments, lets a wrapper return nothing, and stops at the first problem.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from trivet import hookspecs
from trivet.provider import API_VERSION
from trivet.registry.records import HookImpl, Plugin, place_of
from trivet_schemas.errors import suggestion

PHASE_HOOKS = (*hookspecs.ENGINE_PHASES, *hookspecs.WORKER_PHASES)

DEPRECATION_POLICY = (
    "The plugin interface has a version (major, minor). A minor version only adds; what is to go is first marked "
    "deprecated, warns for at least two minor versions, and is removed with the next major version. A plugin works "
    "when its major version equals Trivet's and its minor version is not higher."
)

_IMPL = f"{hookspecs.PROJECT}_impl"
_SPEC = f"{hookspecs.PROJECT}_spec"
_WORDS = inspect.Parameter

Specs = Mapping[str, tuple[str, ...]]
"""Hook name → the argument names of its spec, in order."""


def core_specs() -> dict[str, tuple[str, ...]]:
    """The hooks of Trivet itself."""
    return dict(read_specs(hookspecs))


def read_specs(namespace: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    """``(name, arguments)`` of every hook spec in a module or object."""
    for name, function, marks in _marked(namespace, _SPEC):
        if isinstance(marks, dict):
            arguments = list(inspect.signature(function).parameters)
            if inspect.isclass(namespace) and arguments[:1] == ["self"]:
                del arguments[0]
            yield name, tuple(arguments)


def api_problem(api: object) -> str | None:
    """Why a plugin written for interface version ``api`` cannot be used, None if it can."""
    ours = f"{API_VERSION[0]}.{API_VERSION[1]}"
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)):
        return f"its API version must be a pair such as {API_VERSION}, got {api!r}"
    if api[0] != API_VERSION[0]:
        remedy = "an older Trivet, or a newer release of the plugin" if api[0] < API_VERSION[0] else "a newer Trivet"
        return f"it is written for plugin API {api[0]}.{api[1]}, this Trivet has {ours}; install {remedy}"
    if api[1] > API_VERSION[1]:
        return f"it is written for plugin API {api[0]}.{api[1]}, this Trivet has {ours}; install a newer Trivet"
    return None


def has_hooks(target: object) -> bool:
    """Whether anything in ``target`` carries the hookimpl mark."""
    return next(_marked(target, _IMPL), None) is not None


def unmarked_hooks(target: object) -> list[str]:
    """Functions that have the name of a hook but lack the mark."""
    marked = {name for name, _, _ in _marked(target, _IMPL)}
    known = core_specs()
    return [name for name, _ in _functions(target) if name in known and name not in marked and target is not hookspecs]


def returns_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function returns, and always None, as far as its bytecode tells. One that only raises is another
    matter."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return False
    last: dis.Instruction | None = None
    returns = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_VALUE":
            # A return that is jumped to returns what was left on the stack elsewhere.
            plain = last is not None and last.opname == "LOAD_CONST" and last.argval is None
            if not plain or instruction.is_jump_target:
                return False
            returns = True
        if instruction.opname == "RETURN_CONST":
            if instruction.argval is not None:
                return False
            returns = True
        last = instruction
    return returns


def scan(plugin: Plugin) -> None:
    """Fill ``plugin.hooks`` from its target, reporting what does not depend on the specs."""
    target = plugin.target
    if target is None:
        return
    for name in unmarked_hooks(target):
        plugin.report(f"{name} must be marked with @trivet.hookspecs.hookimpl")
    api = inspect.getattr_static(target, "trivet_api", None)
    if api is not None and (problem := api_problem(api)):
        plugin.report(problem)
    for name, function, marks in _marked(target, _IMPL):
        hook = marks.get("specname") or name
        place = place_of(function)
        if plugin.implements(hook):
            plugin.report(f"{hook} is implemented twice, the second time at {place}")
            continue
        if marks.get("hookwrapper"):
            plugin.report(f"{hook} at {place} is an old-style wrapper; say hookimpl(wrapper=True)")
        arguments, problems = _arguments(function)
        for problem in problems:
            plugin.report(f"{hook} at {place} {problem}")
        wrapper = bool(marks.get("wrapper") or marks.get("hookwrapper"))
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            plugin.report(f"{hook} at {place} is async; hooks are called on the engine's thread and cannot be awaited")
        elif wrapper and not inspect.isgeneratorfunction(function):
            plugin.report(
                f"{hook} at {place} is marked as a wrapper but has no yield; write `result = yield; return result`"
            )
        elif wrapper and (marks.get("specname") or name) in PHASE_HOOKS and returns_nothing(function):
            plugin.report(
                f"{hook} at {place} is a wrapper that returns nothing; end it with `return result`, where "
                "`result = yield`"
            )
        elif not wrapper and inspect.isgeneratorfunction(function):
            plugin.report(f"{hook} at {place} has a yield but is no wrapper; mark it with hookimpl(wrapper=True)")
        plugin.hooks.append(
            HookImpl(
                hook=hook,
                function=function,
                arguments=arguments,
                wrapper=wrapper,
                tryfirst=bool(marks.get("tryfirst")),
                trylast=bool(marks.get("trylast")),
                optional=bool(marks.get("optionalhook")),
                place=place,
            )
        )


def check_hooks(plugin: Plugin, specs: Specs, elsewhere: Mapping[str, str] | None = None) -> None:
    """Compare a plugin's hooks with the specs. ``elsewhere`` names hooks that plugins offer which are not active."""
    for impl in plugin.hooks:
        spec = specs.get(impl.hook)
        if spec is None:
            if not impl.optional:
                plugin.report(_unknown_hook(impl, specs, elsewhere or {}))
            continue
        for argument in impl.arguments:
            if argument not in spec:
                near = suggestion(argument, spec)
                hint = f"; did you mean {near!r}?" if near else f"; it has {', '.join(spec) or 'no arguments'}"
                plugin.report(f"{impl.hook} at {impl.place} takes {argument!r}, which the hook does not have{hint}")
        if impl.hook in PHASE_HOOKS:
            if not impl.wrapper:
                plugin.report(
                    f"{impl.hook} at {impl.place} implements a phase; plugins may only wrap it: mark it with "
                    f"hookimpl(wrapper=True) and yield, or offer a provider for the role that does the work"
                )
        elif impl.hook in hookspecs.PROVIDER_HOOKS or impl.hook in hookspecs.OBSERVER_HOOKS:
            if impl.wrapper:
                kind = "start-up" if impl.hook in hookspecs.PROVIDER_HOOKS else "observer"
                plugin.report(f"{impl.hook} at {impl.place} wraps, but {kind} hooks cannot be wrapped; phases can")
            elif impl.tryfirst or impl.trylast:
                plugin.report(
                    f"{impl.hook} at {impl.place} asks for tryfirst or trylast, which means nothing here: "
                    f"such hooks are called in the order of registration"
                )


def _unknown_hook(impl: HookImpl, specs: Specs, elsewhere: Mapping[str, str]) -> str:
    text = f"unknown hook {impl.hook!r} at {impl.place}"
    if impl.hook in elsewhere:
        return f"{text}: {elsewhere[impl.hook]} offers it, but is not active; name it in the configuration"
    near = suggestion(impl.hook, specs)
    return f"{text}; did you mean {near!r}?" if near else f"{text}; hooks are listed in docs/contracts.md"


def _arguments(function: Callable[..., Any]) -> tuple[tuple[str, ...], list[str]]:
    names: list[str] = []
    problems: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is _WORDS.KEYWORD_ONLY:
            problems.append(
                f"has the keyword-only argument {parameter.name!r}, which is never filled; remove the * before it"
            )
        elif parameter.kind in {_WORDS.VAR_POSITIONAL, _WORDS.VAR_KEYWORD}:
            star = "*" if parameter.kind is _WORDS.VAR_POSITIONAL else "**"
            problems.append(f"takes {star}{parameter.name}, which is never filled; name the arguments that it uses")
        else:
            names.append(parameter.name)
    return tuple(names), problems


def _marked(target: object, mark: str) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    for name, (holder, function) in _holders(target):
        marks = getattr(holder, mark, None)
        if marks is None:
            marks = getattr(getattr(holder, "__func__", None), mark, None)
        if isinstance(marks, dict):
            yield name, function, marks


def _functions(target: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, (_, function) in _holders(target):
        yield name, function


def _holders(target: object) -> Iterator[tuple[str, tuple[Any, Callable[..., Any]]]]:
    """``(name, (what may carry a mark, the bound function))``; descriptors such as properties are never evaluated."""
    for name in _attribute_names(target):
        static = inspect.getattr_static(target, name, None)
        if isinstance(static, MemberDescriptorType):
            continue
        if isinstance(static, FunctionType | staticmethod | classmethod | MethodType):
            holder = static
            yield name, (holder, getattr(target, name))


def _attribute_names(target: object) -> Iterable[str]:
    return sorted(vars(target)) if isinstance(target, ModuleType) else dir(target)
