"""Validation of hook implementations: every problem has a message that names plugin, place and remedy."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from trivet import hookspecs
from trivet.hookspecs import hookimpl
from trivet.provider import API_VERSION
from trivet.registry import DEPRECATION_POLICY
from trivet.registry.validation import api_problem, core_specs

CASES = {
    "an unknown hook": (
        "@hookimpl\ndef trivet_step_finnished(event): ...",
        ["unknown hook 'trivet_step_finnished'", "did you mean 'trivet_step_finished'?"],
    ),
    "a misspelt argument": (
        "@hookimpl\ndef trivet_step_finished(evnt): ...",
        ["takes 'evnt', which the hook does not have", "did you mean 'event'?"],
    ),
    "a misspelt argument with a default, which pluggy accepts and never fills": (
        "@hookimpl\ndef trivet_step_finished(event, resutl=None): ...",
        ["takes 'resutl', which the hook does not have"],
    ),
    "a keyword-only argument": (
        "@hookimpl\ndef trivet_step_finished(*, event): ...",
        ["keyword-only argument 'event'", "remove the *"],
    ),
    "a keyword-only argument with a default": (
        "@hookimpl\ndef trivet_step_finished(*, event=None): ...",
        ["keyword-only argument 'event'"],
    ),
    "variable arguments": (
        "@hookimpl\ndef trivet_step_finished(*args): ...",
        ["takes *args", "name the arguments"],
    ),
    "variable keywords": (
        "@hookimpl\ndef trivet_step_finished(event, **kwargs): ...",
        ["takes **kwargs"],
    ),
    "a wrapper without a yield": (
        "@hookimpl(wrapper=True)\ndef trivet_schedule(inputs):\n    return None",
        ["marked as a wrapper but has no yield"],
    ),
    "an old-style wrapper": (
        "@hookimpl(hookwrapper=True)\ndef trivet_schedule(inputs):\n    yield",
        ["old-style wrapper", "hookimpl(wrapper=True)"],
    ),
    "a yield without the mark of a wrapper": (
        "@hookimpl\ndef trivet_step_finished(event):\n    yield",
        ["has a yield but is no wrapper"],
    ),
    "a phase implemented without wrapping": (
        "@hookimpl\ndef trivet_schedule(inputs):\n    return inputs",
        ["implements a phase; plugins may only wrap it", "hookimpl(wrapper=True)", "offer a provider"],
    ),
    "an async hook": (
        "@hookimpl\nasync def trivet_step_finished(event): ...",
        ["is async"],
    ),
    "an async generator": (
        "@hookimpl(wrapper=True)\nasync def trivet_schedule(inputs):\n    yield",
        ["is async"],
    ),
    "a wrapped observer": (
        "@hookimpl(wrapper=True)\ndef trivet_step_finished(event):\n    return (yield)",
        ["observer hooks cannot be wrapped"],
    ),
    "a wrapped start-up hook": (
        "@hookimpl(wrapper=True)\ndef trivet_providers():\n    return (yield)",
        ["start-up hooks cannot be wrapped"],
    ),
    "an order for observers": (
        "@hookimpl(tryfirst=True)\ndef trivet_step_finished(event): ...",
        ["tryfirst or trylast", "order of registration"],
    ),
    "one hook twice": (
        (
            "@hookimpl\ndef trivet_step_finished(event): ...\n"
            "@hookimpl(specname='trivet_step_finished')\ndef z_again(event): ..."
        ),
        ["trivet_step_finished is implemented twice"],
    ),
    "another API version": (
        "trivet_api = (99, 0)\n@hookimpl\ndef trivet_step_finished(event): ...",
        ["plugin API 99.0", "install a newer Trivet"],
    ),
    "an API version that is none": (
        "trivet_api = '1.0'\n@hookimpl\ndef trivet_step_finished(event): ...",
        ["API version must be a pair", "'1.0'"],
    ),
    "hook specs without specs": (
        "@hookimpl\ndef trivet_add_hookspecs():\n    return [object()]",
        ["no function marked with hookspec"],
    ),
    "a hook that exists already": (
        (
            "class Specs:\n    @hookspec\n    def trivet_schedule(self, inputs): ...\n"
            "@hookimpl\ndef trivet_add_hookspecs():\n    return [Specs]"
        ),
        ["offers the hook 'trivet_schedule', which Trivet itself has already"],
    ),
    "a provider hook that returns no list": (
        "@hookimpl\ndef trivet_providers():\n    return None",
        ["trivet_providers", "must return a list, got None"],
    ),
    "a provider hook that returns something else": (
        "@hookimpl\ndef trivet_providers():\n    return ['scheduler']",
        ["trivet_providers returned 'scheduler'", "trivet.provider.Provider"],
    ),
    "a provider hook that raises": (
        "@hookimpl\ndef trivet_providers():\n    raise ValueError('boom')",
        ["trivet_providers", "raised ValueError: boom"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_hook_is_refused_with_plugin_place_and_remedy(world: Any, case: str) -> None:
    source, parts = CASES[case]
    path = world.plugin("bad", source, distribution="acme-bad", version="2.3")
    problems = world.problems({"extension": [{"use": "bad"}]})
    matching = [problem for problem in problems if all(part in problem for part in parts)]
    assert len(matching) == 1, problems
    for part in ("plugins.extension.0", "plugin 'bad' (acme-bad 2.3", str(path)):
        assert part in matching[0]


def test_the_line_of_the_function_is_named(world: Any) -> None:
    path = world.plugin("bad", "\n\n\n@hookimpl\ndef trivet_step_finished(evnt): ...\n")
    line = path.read_text(encoding="utf-8").splitlines().index("@hookimpl") + 1
    assert f"{path}:{line}" in world.problem({"extension": ["bad"]})


def test_wrong_hooks_of_objects_are_refused_before_anything_runs(world: Any) -> None:
    class Bad:
        @hookimpl
        def trivet_providers(self, extra: Any = None) -> list[Any]:
            raise AssertionError("called although its arguments are wrong")

    assert "takes 'extra'" in world.problem(None, Bad())


def test_all_problems_of_all_plugins_come_at_once(world: Any) -> None:
    class First:
        @hookimpl
        def trivet_schedule(self, inputs: Any) -> Any: ...

        @hookimpl
        def trivet_step_finished(self, evnt: Any) -> None: ...

    class Second:
        @hookimpl
        def trivet_no_such_thing(self) -> None: ...

    problems = world.problems({"scheduler": "nobody", "schedular": "x"}, First(), Second(), object)
    found = "\n".join(problems)
    for part in (
        "unknown plugin 'nobody'",
        "unknown role 'schedular'; did you mean 'scheduler'?",
        "implements a phase",
        "'evnt'",
        "trivet_no_such_thing",
        "forgotten the ()",
    ):
        assert found.count(part) == 1, (part, found)
    assert len(problems) == 6


def test_an_optional_hook_may_be_unknown(world: Any) -> None:
    class Guest:
        @hookimpl(optionalhook=True)
        def acme_something(self, x: Any) -> None: ...

    assert world.registry(None, Guest()).freeze() is not None


def test_a_correct_argument_with_a_default_is_filled(world: Any) -> None:
    seen: list[Any] = []

    class Watcher:
        @hookimpl
        def trivet_step_finished(self, event: Any = None) -> None:
            seen.append(event)

    world.registry(None, Watcher()).freeze().step_finished("event")  # type: ignore[arg-type]
    assert seen == ["event"]


def test_static_and_class_methods_are_hooks_too(world: Any) -> None:
    seen: list[str] = []

    class Watcher:
        @staticmethod
        @hookimpl
        def trivet_engine_stopped(reason: str) -> None:
            seen.append(reason)

        @classmethod
        @hookimpl
        def trivet_step_finished(cls, event: Any) -> None:
            seen.append(event)

    hooks = world.registry(None, Watcher()).freeze()
    hooks.engine_stopped("shutdown")
    hooks.step_finished("event")  # type: ignore[arg-type]
    assert seen == ["shutdown", "event"]


@pytest.mark.parametrize(
    ("api", "part"),
    [
        ((API_VERSION[0], API_VERSION[1]), None),
        ((API_VERSION[0], API_VERSION[1] + 1), "install a newer Trivet"),
        ((API_VERSION[0] + 1, 0), "install a newer Trivet"),
        ((API_VERSION[0] - 1, 9), "an older Trivet, or a newer release of the plugin"),
        ((1,), "must be a pair"),
        ((True, False), "must be a pair"),
    ],
)
def test_the_major_version_must_equal_and_the_minor_not_exceed_ours(api: Any, part: str | None) -> None:
    problem = api_problem(api)
    assert problem is None if part is None else part in str(problem)


def test_the_deprecation_policy_is_stated() -> None:
    assert "two minor versions" in textwrap.dedent(DEPRECATION_POLICY)


def test_the_specs_are_those_of_the_module() -> None:
    names = (
        *hookspecs.PROVIDER_HOOKS,
        *hookspecs.ENGINE_PHASES,
        *hookspecs.WORKER_PHASES,
        *hookspecs.OBSERVER_HOOKS,
    )
    assert set(core_specs()) == set(names)
    assert core_specs()["trivet_commit"] == ("plan", "result")
