"""Discovery: entry points of real distributions and objects; discovery is not activation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trivet.hookspecs import hookimpl
from trivet.registry import Catalog

SCHEDULER = 'Provider("scheduler", "mine", "fakes:Scheduler")'


class Watching:
    """An observer; all of them are equal."""

    told = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Watching)

    __hash__ = None  # type: ignore[assignment]

    @hookimpl
    def trivet_step_finished(self, event: Any) -> None:
        type(self).told += 1


def report(registry: Any, name: str) -> Any:
    return next(plugin for plugin in registry.plugins() if plugin.name == name)


def test_a_strangers_plugin_is_found_but_inactive_until_the_configuration_names_it(world: Any) -> None:
    path = world.offering("mine", SCHEDULER, distribution="acme-sched")
    found = report(world.registry(), "mine")
    assert (found.origin, found.active, found.distribution, found.version) == ("installed", False, "acme-sched", "1.0")
    assert (found.file, found.providers) == (str(path), [("scheduler", "mine")])
    registry = world.registry({"scheduler": "mine"})
    assert report(registry, "mine").active
    assert type(registry.engine_context.get("scheduler")).__name__ == "Scheduler"


def test_an_inactive_strangers_hooks_are_never_called(world: Any) -> None:
    world.plugin("spy", "@hookimpl\ndef trivet_engine_started(context):\n    raise AssertionError('active')\n")
    hooks = world.registry().freeze()
    assert not hooks.has_observers("engine_started")


def test_a_failing_import_is_no_obstacle_and_is_reported(world: Any) -> None:
    world.plugin("broken", "import no_such_module_anywhere\n", distribution="acme-broken", version="3.1")
    world.offering("mine", SCHEDULER)
    registry = world.registry({"scheduler": "mine"})
    found = report(registry, "broken")
    assert not found.active
    (problem,) = found.problems
    for part in ("'broken'", "broken_plugin", "acme-broken 3.1", "ModuleNotFoundError", "no_such_module_anywhere"):
        assert part in problem


@pytest.mark.parametrize("failure", ["raise RuntimeError('boom')", "raise SystemExit('boom')", "def (:", "1 / 0"])
def test_a_module_may_fail_in_any_way(world: Any, failure: str) -> None:
    world.plugin("broken", failure)
    assert report(world.registry(), "broken").problems


def test_a_failing_import_is_an_error_when_the_configuration_names_the_entry_point(world: Any) -> None:
    world.plugin("broken", "raise RuntimeError('boom')\n", distribution="acme-broken", version="3.1")
    for plugins in ({"scheduler": "broken"}, {"extension": [{"use": "broken"}]}):
        problem = world.problem(plugins)
        for part in ("plugins.", "'broken'", "acme-broken 3.1", "RuntimeError: boom"):
            assert part in problem


def test_a_failing_import_is_noted_when_the_named_provider_is_unknown(world: Any) -> None:
    world.plugin("broken", "raise RuntimeError('boom')\n")
    problem = world.problem({"scheduler": "clever"})
    assert "unknown plugin 'clever'" in problem
    assert "note: entry point 'broken'" in problem


@pytest.mark.parametrize(
    ("target", "part"), [("Plugin", "have you forgotten the ()?"), ("plugin", "all engines of the process would share")]
)
def test_an_entry_point_is_a_module(world: Any, target: str, part: str) -> None:
    source = "class Plugin:\n    @hookimpl\n    def trivet_engine_started(self, context): ...\n\nplugin = Plugin()\n"
    world.module("thing", source)
    world.distribution("acme-thing", "1.0", {"thing": f"thing:{target}"})
    assert part in world.problem({"extension": [{"use": "thing"}]})


def test_a_class_passed_instead_of_an_object(world: Any) -> None:
    class Watcher:
        @hookimpl
        def trivet_engine_started(self, context: Any) -> None: ...

    problem = world.problem(None, Watcher)
    assert "Watcher is a class, not an object; have you forgotten the ()?" in problem
    assert str(Path(__file__)) in problem
    assert world.registry(None, Watcher()).active


def test_an_object_given_twice(world: Any) -> None:
    watcher = Watching()
    assert "the same object is given twice" in world.problem(None, watcher, watcher)


def test_equal_objects_are_two_plugins(world: Any) -> None:
    Watching.told = 0
    world.registry(None, Watching(), Watching()).freeze().step_finished("event")
    assert Watching.told == 2


def test_one_entry_point_name_in_two_distributions_is_two_plugins(world: Any) -> None:
    for number, role in enumerate(("scheduler", "cache")):
        hook = "@hookimpl\ndef trivet_step_finished(event): ...\n"
        offer = f'[Provider("{role}", "{role}{number}", "fakes:Role")]'
        world.module(f"same{number}", f"{hook}\n@hookimpl\ndef trivet_providers():\n    return {offer}\n")
        world.distribution(f"acme-{number}", "1.0", {"same": f"same{number}"})
    registry = world.registry({"scheduler": "scheduler0", "cache": "cache1"})
    assert registry.hook_order()["trivet_step_finished"] == ["same", "same"]


def test_an_object_without_hooks_or_role(world: Any) -> None:
    assert "no hook implementation" in world.problem(None, object())


def test_a_hook_without_its_mark_is_told(world: Any) -> None:
    class Forgetful:
        def trivet_step_finished(self, event: Any) -> None: ...

    assert "trivet_step_finished must be marked with @trivet.hookspecs.hookimpl" in world.problem(None, Forgetful())


def test_an_installed_module_without_hooks_cannot_be_used(world: Any) -> None:
    world.plugin("empty", "x = 1\n")
    assert "has no hook implementation" in world.problem({"extension": ["empty"]})


def test_properties_are_never_evaluated(world: Any) -> None:
    class Watcher:
        @property
        def trivet_other(self) -> Any:
            raise AssertionError("evaluated")

        @hookimpl
        def trivet_engine_started(self, context: Any) -> None: ...

    assert world.registry(None, Watcher()).active


def test_the_first_distribution_of_a_name_on_the_path_counts(world: Any) -> None:
    world.bundle(only='@hookimpl\ndef trivet_providers():\n    return [Provider("cache", "tiny", "fakes:Cache")]\n')
    bundled = [plugin.name for plugin in Catalog().plugins if plugin.origin.value == "bundled"]
    assert bundled == ["only"]


def test_the_registry_is_light_to_import() -> None:
    code = "import sys, trivet.registry; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_discovering_the_bundled_plugins_loads_no_deep_learning_library() -> None:
    code = (
        "import sys; from trivet.registry import Catalog; c = Catalog(); c.option_models()\n"
        "print(len(c.plugins) > 0, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "True []"
