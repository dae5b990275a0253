"""One pluggy manager per engine (and per worker): guards around wrappers, compiled observers, and the freeze."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

import pluggy

from trivet import hookspecs
from trivet.errors import PluginError
from trivet.hooks import Observer, PhaseAdapter
from trivet.registry.records import HookImpl, Plugin
from trivet.registry.validation import PHASE_HOOKS

if TYPE_CHECKING:
    from trivet.hooks import HookStats

#: phases whose result a wrapper must pass on as it is
_SAME_RESULT = frozenset({"trivet_schedule", "trivet_run", "trivet_commit", "trivet_sample"})
_ADAPTER = "trivet"


class Manager(pluggy.PluginManager):
    """A plugin manager that can be frozen."""

    def __init__(self) -> None:
        super().__init__(hookspecs.PROJECT)
        self._frozen = False
        super().add_hookspecs(hookspecs)

    def freeze(self) -> None:
        """Refuse every change from now on."""
        self._frozen = True

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        """Register, unless frozen."""
        self._refuse(f"{name or plugin!r} cannot be registered")
        return super().register(plugin, name)

    def unregister(self, plugin: Any = None, name: str | None = None) -> Any:
        """Unregister, unless frozen."""
        self._refuse(f"{name or plugin!r} cannot be unregistered")
        return super().unregister(plugin, name)

    def set_blocked(self, name: str) -> None:
        """Block a name, unless frozen."""
        self._refuse(f"{name!r} cannot be blocked")
        super().set_blocked(name)

    def unblock(self, name: str) -> bool:
        """Unblock a name, unless frozen."""
        self._refuse(f"{name!r} cannot be unblocked")
        return super().unblock(name)

    def add_hookspecs(self, module_or_class: Any) -> None:
        """Add specs, unless frozen."""
        self._refuse(f"hook specs of {module_or_class!r} cannot be added")
        super().add_hookspecs(module_or_class)

    def _refuse(self, what: str) -> None:
        if self._frozen:
            raise PluginError(f"{what}: the plugins of a running engine are frozen; pass them when it is made")


class Registered:
    """Stands for one plugin in the manager, with its hooks other than phases under their names.

    Pluggy compares plugins with ``==``, which two equal objects of an embedder must not meet.
    """

    def __init__(self, plugin: Plugin) -> None:
        self.name = plugin.name
        for impl in plugin.hooks:
            if impl.hook not in PHASE_HOOKS:
                setattr(self, impl.hook, impl.function)


class Guard:
    """Stands for one plugin's wrapper of one phase: checks its result, names it in exceptions, counts and times it."""

    def __init__(self, plugin: Plugin, impl: HookImpl, stats: HookStats) -> None:
        self.name = plugin.name
        self._plugin, self._impl, self._stats = plugin, impl, stats

    def around(self, **arguments: Any) -> Generator[None, Any, Any]:
        """Drive the plugin's generator as pluggy would."""
        impl = self._impl
        key = (self._plugin.name, impl.hook)
        self._stats.calls[key] += 1
        start = time.perf_counter()
        controller = impl.function(**{name: arguments[name] for name in impl.arguments})
        try:
            next(controller)
        except StopIteration:
            self._fail("returned without a yield")
        except Exception as exc:
            self._annotate(exc)
            raise
        before = time.perf_counter() - start
        outcome: Any = None
        failure: BaseException | None = None
        try:
            outcome = yield
        except BaseException as exc:  # noqa: BLE001 - handed to the wrapper, which raises it again or another one
            failure = exc
        start = time.perf_counter()
        try:
            returned = self._finish(controller, outcome, failure)
        finally:
            self._stats.seconds[key] += before + time.perf_counter() - start
        self._check(returned, outcome, failure)
        return returned

    def _finish(self, controller: Generator[None, Any, Any], outcome: Any, failure: BaseException | None) -> Any:
        try:
            if failure is None:
                controller.send(outcome)
            else:
                controller.throw(failure)
        except StopIteration as stop:
            return stop.value
        except Exception as exc:
            if exc is not failure:
                self._annotate(exc)
            raise
        controller.close()
        return self._fail("has a second yield")

    def _check(self, returned: Any, outcome: Any, failure: BaseException | None) -> None:
        hook = self._impl.hook
        if returned is None:
            self._fail("returned nothing; end it with `return result`, where `result = yield`")
        if hook in _SAME_RESULT and failure is not None:
            self._fail(f"hid the exception {type(failure).__name__}: {failure}; let it pass", failure)
        if hook in _SAME_RESULT and returned is not outcome:
            self._fail(f"returned another {type(outcome).__name__} than it got from yield; return that very object")
        expected = _result_type(hook)
        if expected is not None and not isinstance(returned, expected):
            self._fail(f"returned {type(returned).__name__}, expected {expected.__name__}")

    def _fail(self, what: str, cause: BaseException | None = None) -> Never:
        self._stats.errors[self._plugin.name, self._impl.hook] += 1
        raise PluginError(
            f"{self._plugin.label}: the wrapper {self._impl.hook} at {self._impl.place} {what}"
        ) from cause

    def _annotate(self, exc: BaseException) -> None:
        self._stats.errors[self._plugin.name, self._impl.hook] += 1
        exc.add_note(f"raised in {self._impl.hook} of {self._plugin.label}")


def _result_type(hook: str) -> type | None:
    if hook == "trivet_forward":
        from trivet.roles.model import ForwardOutput

        return ForwardOutput
    if hook == "trivet_draft":
        from trivet.roles.drafter import Drafts

        return Drafts
    return None


def _guard(plugin: Plugin, impl: HookImpl, stats: HookStats) -> Guard:
    """A guard with one wrapper under the hook's name.

    Pluggy reads argument names from the function's code, so each hook needs one of its own.
    """
    guard = Guard(plugin, impl, stats)
    mark = hookspecs.hookimpl(wrapper=True, tryfirst=impl.tryfirst, trylast=impl.trylast)
    setattr(guard, impl.hook, mark(_FUNCTIONS[impl.hook](guard.around)))
    return guard


_Around = Callable[..., Generator[None, Any, Any]]


def _schedule(around: _Around) -> _Around:
    def trivet_schedule(inputs: Any) -> Generator[None, Any, Any]:
        return (yield from around(inputs=inputs))

    return trivet_schedule


def _run(around: _Around) -> _Around:
    def trivet_run(plan: Any) -> Generator[None, Any, Any]:
        return (yield from around(plan=plan))

    return trivet_run


def _commit(around: _Around) -> _Around:
    def trivet_commit(plan: Any, result: Any) -> Generator[None, Any, Any]:
        return (yield from around(plan=plan, result=result))

    return trivet_commit


def _forward(around: _Around) -> _Around:
    def trivet_forward(batch: Any) -> Generator[None, Any, Any]:
        return (yield from around(batch=batch))

    return trivet_forward


def _sample(around: _Around) -> _Around:
    def trivet_sample(logits: Any, rows: Any) -> Generator[None, Any, Any]:
        return (yield from around(logits=logits, rows=rows))

    return trivet_sample


def _draft(around: _Around) -> _Around:
    def trivet_draft(inputs: Any) -> Generator[None, Any, Any]:
        return (yield from around(inputs=inputs))

    return trivet_draft


_FUNCTIONS: dict[str, Callable[[_Around], _Around]] = {
    "trivet_schedule": _schedule,
    "trivet_run": _run,
    "trivet_commit": _commit,
    "trivet_forward": _forward,
    "trivet_sample": _sample,
    "trivet_draft": _draft,
}


def build_manager(plugins: Sequence[Plugin], stats: HookStats) -> tuple[Manager, PhaseAdapter]:
    """Register validated plugins, in order, in a fresh manager: specs, the core's adapter, then guards and plugins."""
    manager, adapter = Manager(), PhaseAdapter()
    for plugin in plugins:
        for namespace in plugin.specs:
            manager.add_hookspecs(namespace)
    manager.register(adapter, _ADAPTER)
    for number, plugin in enumerate(plugins):
        # Two distributions may use one entry point name, so a name alone is not unique.
        key = f"{number}:{plugin.name}"
        for impl in plugin.hooks:
            if impl.hook in PHASE_HOOKS:
                manager.register(_guard(plugin, impl, stats), f"{key}:{impl.hook}")
        manager.register(Registered(plugin), key)
    return manager, adapter


def wrappers_of(manager: Manager, hook: str) -> list[str]:
    """Names of the plugins that wrap a phase, outermost first."""
    plugins = [impl.plugin for impl in reversed(getattr(manager.hook, hook).get_hookimpls())]
    return [plugin.name for plugin in plugins if isinstance(plugin, Guard)]


def compile_observers(plugins: Sequence[Plugin], specs: Mapping[str, tuple[str, ...]]) -> dict[str, list[Observer]]:
    """Observer hook → its observers in the order of registration, as callables of the hook's positional arguments."""
    compiled: dict[str, list[Observer]] = {hook: [] for hook in hookspecs.OBSERVER_HOOKS}
    for plugin in plugins:
        for impl in plugin.hooks:
            if impl.hook in compiled:
                compiled[impl.hook].append(Observer(plugin.name, _positional(impl, specs[impl.hook])))
    return compiled


def _positional(impl: HookImpl, spec: tuple[str, ...]) -> Callable[..., Any]:
    function = impl.function
    if impl.arguments == spec:
        return function
    picks = [spec.index(name) for name in impl.arguments]

    def call(*arguments: Any) -> Any:
        return function(*(arguments[pick] for pick in picks))

    return call
