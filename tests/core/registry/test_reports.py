"""Reports for the launcher: chosen providers and why, plugins with their hooks in call order."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from trivet.hookspecs import hookimpl
from trivet.registry import Catalog, known_flat_names
from trivet.roles.base import CARDINALITY

OFFERS = """
from pydantic import Field
from trivet_schemas.options import Options, flat

class SchedulerOptions(Options):
    seqs: int = Field(8, json_schema_extra=flat("max_num_seqs"))

@hookimpl
def trivet_providers():
    return [Provider("scheduler", "{name}", "fakes:Scheduler", options=SchedulerOptions)]
"""


def test_every_role_is_reported_with_provider_reason_and_distribution(world: Any) -> None:
    world.bundle(a=OFFERS.format(name="continuous"))
    reports = {report.role: report for report in world.registry({"scheduler": {"seqs": 2}}).report()}
    assert set(reports) == set(CARDINALITY)
    (choice,) = reports["scheduler"].chosen
    assert (choice.provider, choice.why) == ("continuous", "auto: the only bundled provider")
    assert (choice.distribution, choice.version, choice.options) == ("trivet", "7.7", {"seqs": 2})
    assert "has no provider" in str(reports["cache"].problem)
    assert reports["drafter"].problem is None
    assert (reports["model"].side, reports["drafter"].cardinality) == ("worker", "per request")
    assert json.dumps([asdict(report) for report in reports.values()])


class Wrapper:
    def __init__(self, name: str) -> None:
        self.trivet_name = name

    @hookimpl(wrapper=True)
    def trivet_schedule(self, inputs: Any) -> Any:
        return (yield)

    @hookimpl
    def trivet_step_finished(self, event: Any) -> None: ...


def test_hooks_are_reported_in_call_order(world: Any) -> None:
    registry = world.registry(None, Wrapper("first"), Wrapper("second"))
    for _ in range(2):  # before and after the freeze alike
        order = registry.hook_order()
        assert order == {"trivet_schedule": ["second", "first"], "trivet_step_finished": ["first", "second"]}
        plugins = {plugin.name: plugin for plugin in registry.plugins()}
        found = {(hook.hook, hook.kind, hook.order) for hook in plugins["first"].hooks}
        assert found == {("trivet_schedule", "wraps", 2), ("trivet_step_finished", "observes", 1)}
        if registry.engine_context.manager is None:
            registry.freeze()


def test_an_inactive_plugin_is_reported_with_its_hooks_and_problems(world: Any) -> None:
    world.plugin("bad", "@hookimpl\ndef trivet_step_finished(evnt): ...\n")
    (plugin,) = (plugin for plugin in world.registry().plugins() if plugin.name == "bad")
    assert not plugin.active
    assert [(hook.hook, hook.order) for hook in plugin.hooks] == [("trivet_step_finished", None)]
    assert "takes 'evnt'" in plugin.problems[0]


def test_option_models_by_role_and_provider(world: Any) -> None:
    world.bundle(a=OFFERS.format(name="continuous"))
    world.plugin("theirs", OFFERS.format(name="theirs"))
    assert list(Catalog().option_models()["scheduler"]) == ["continuous", "theirs"]
    assert list(Catalog().option_models(bundled_only=True)["scheduler"]) == ["continuous"]


def test_the_option_models_of_extensions_are_for_the_schema_only(world: Any) -> None:
    world.plugin(
        "mark",
        """
        from fakes import SizeOptions as trivet_options

        @hookimpl
        def trivet_step_finished(event): ...
        """,
    )
    assert "extension" not in Catalog().option_models()
    models = Catalog().option_models(extensions=True)
    assert models["extension"]["mark"].__name__ == "SizeOptions"


def test_a_broken_option_model_is_reported_and_left_out(world: Any) -> None:
    world.bundle(
        a="@hookimpl\ndef trivet_providers():\n"
        '    return [Provider("cache", "c", "fakes:Cache", options="fakes:Missing")]\n'
    )
    catalog = Catalog()
    assert catalog.option_models() == {}
    assert any("has no 'Missing'" in problem for plugin in catalog.plugins for problem in plugin.problems)


def test_flat_arguments_come_from_bundled_and_named_plugins_only(world: Any) -> None:
    world.bundle(a=OFFERS.format(name="continuous"))
    source = OFFERS.format(name="theirs").replace("max_num_seqs", "their_seqs").replace("seqs: int", "count: int")
    world.plugin("theirs", source)
    optional = {"quantization": [("quantization", "use")], "connector": [("connector", "use")]}
    assert known_flat_names() == {"max_num_seqs": [("scheduler", "seqs")], **optional}
    for selections in ({"scheduler": "theirs"}, {"scheduler": {"use": "theirs"}}, {"scheduler": [{"use": "theirs"}]}):
        assert known_flat_names(selections=selections)["their_seqs"] == [("scheduler", "count")]


class TestCheck:
    def test_a_sound_environment_has_no_problems(self, world: Any) -> None:
        world.bundle(a=OFFERS.format(name="continuous"))
        world.plugin("theirs", OFFERS.format(name="theirs"))
        assert Catalog().check() == []

    def test_what_is_wrong_is_found_although_nothing_is_used(self, world: Any) -> None:
        world.plugin("broken", "raise RuntimeError('boom')")
        world.plugin("bad", "@hookimpl\ndef trivet_step_finished(evnt): ...\n")
        world.offering("one", 'Provider("cache", "c", "fakes:Cache", reducers={"x": "fakes:no_reducer"})')
        world.offering("two", 'Provider("cache", "c", "fakes:NoCache")')
        world.offering("three", 'Provider("connector", "c", "fakes:Connector", worker_factory="fakes:NoWorker")')
        world.offering("four", 'Provider("cache", "far", "nowhere:Cache", requires={"no_such_module": "far"})')
        world.plugin(
            "five", '@hookimpl\ndef trivet_components():\n    return [Component("policy", "p", "fakes:no_policy")]\n'
        )
        problems = Catalog().check()
        for part in (
            "RuntimeError: boom",
            "takes 'evnt'",
            "the provider 'c' is offered by plugin 'one' (acme-one 1.0",
            "has no 'no_reducer'",
            "has no 'NoCache'",
            "has no 'NoWorker'",
            "has no 'no_policy'",
        ):
            assert sum(part in problem for problem in problems) == 1, (part, problems)
        assert len(problems) == 7
