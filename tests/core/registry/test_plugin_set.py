"""A plugin set is plain data from which another process rebuilds exactly the same plugins."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from trivet.errors import PluginError
from trivet.hookspecs import hookimpl
from trivet.provider import Component, Provider
from trivet_schemas.options import Options

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32}


def ranked(name: str, rank: int) -> str:
    suits = f'lambda context: Suitability({rank}, "")'
    return f'Provider("model", "{name}", "fakes:Model", options="fakes:SizeOptions", suits={suits})'


def bundle(world: Any) -> None:
    world.bundle(models=f"@hookimpl\ndef trivet_providers():\n    return [{ranked('slow', 1)}, {ranked('fast', 2)}]\n")


def chosen(registry: Any) -> dict[str, list[Any]]:
    return {r.role: [(c.plugin, c.provider, c.options) for c in r.chosen] for r in registry.report() if r.chosen}


def test_a_set_is_json_and_names_what_was_chosen(world: Any) -> None:
    bundle(world)
    world.plugin("mark", "@hookimpl\ndef trivet_step_finished(event): ...\n", version="2.5")
    registry = world.registry({"model": {"size": 9}, "extension": ["mark"]}, required=["model"])
    data = registry.plugin_set()
    assert json.loads(json.dumps(data)) == data
    assert data["config"]["plugins"]["model"] == {"use": "fast", "size": 9}
    assert {(entry["distribution"], entry["name"], entry["version"]) for entry in data["installed"]} == {
        ("trivet", "models", "7.7"),
        ("acme-mark", "mark", "2.5"),
    }


def test_a_worker_rebuilds_the_same_set(world: Any) -> None:
    bundle(world)
    world.plugin("mark", "@hookimpl(wrapper=True)\ndef trivet_sample(logits, rows):\n    return (yield)\n")
    registry = world.registry({"model": {"size": 9}, "extension": ["mark"]}, required=["model"])
    rebuilt = world.worker_registry(json.loads(json.dumps(registry.plugin_set())))
    assert chosen(rebuilt) == chosen(registry)
    assert [plugin.name for plugin in rebuilt.active] == [plugin.name for plugin in registry.active]
    worker = rebuilt.worker_context(**SIZES)
    assert worker.get("model").options.size == 9
    assert worker.hooks.wrappers("sample") == ("mark",)


def test_what_auto_chose_stays_chosen_although_a_stranger_has_the_same_name(world: Any) -> None:
    bundle(world)
    world.offering("theirs", 'Provider("model", "fast", "fakes:Model")')
    registry = world.registry(required=["model"])
    assert chosen(world.worker_registry(registry.plugin_set())) == chosen(registry)


def test_another_process_rebuilds_it(world: Any) -> None:
    bundle(world)
    data = world.registry(required=["model"]).plugin_set()
    code = (
        f"import json, sys; sys.path.insert(0, {str(world.folder)!r})\n"
        "from trivet.registry import Registry\n"
        f"registry = Registry.from_plugin_set(json.loads({json.dumps(json.dumps(data))}))\n"
        "print(type(registry.worker_context(max_num_seqs=1, max_num_batched_tokens=1).get('model')).__module__)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "fakes"


def test_a_missing_plugin_or_another_version_is_refused(world: Any) -> None:
    bundle(world)
    data = world.registry(required=["model"]).plugin_set()
    data["installed"][0]["version"] = "7.6"
    data["installed"].append({"name": "gone", "entry_point": "gone", "distribution": "acme-gone", "version": "1.0"})
    with pytest.raises(PluginError) as caught:
        world.worker_registry(data)
    first, second = caught.value.problems
    assert "'models' of trivet 7.6 is active in the engine, but this worker has version 7.7" in first
    assert "'gone' of acme-gone 1.0 is active in the engine but not installed in this worker" in second


def test_another_api_version_is_refused(world: Any) -> None:
    data = world.registry().plugin_set()
    data["api"] = [1, 99]
    with pytest.raises(PluginError, match=r"the engine has plugin API 1\.99, this worker has 1\.0"):
        world.worker_registry(data)


WATCHER = """
class Watcher:
    def __init__(self, key):
        self.trivet_import = ("watching:Watcher", {"key": key})

    @hookimpl(wrapper=True)
    def trivet_sample(self, logits, rows):
        return (yield)


@hookimpl
def trivet_step_finished(event): ...
"""


def test_objects_with_an_import_path_are_rebuilt(world: Any) -> None:
    world.module("watching", WATCHER)
    import watching

    processor = Provider("logits_processor", "mine", "fakes:LogitsProcessor", options="fakes:SizeOptions")
    part = Component("policy", "odd", "fakes:concrete")
    registry = world.registry(None, watching.Watcher(7), watching, processor, part)
    data = json.loads(json.dumps(registry.plugin_set()))
    rebuilt = world.worker_registry(data)
    assert [plugin.name for plugin in rebuilt.active] == [plugin.name for plugin in registry.active]
    watcher = rebuilt.active[0].target
    assert watcher is not registry.active[0].target
    assert watcher.trivet_import == ("watching:Watcher", {"key": 7})
    assert chosen(rebuilt) == chosen(registry)


def test_objects_without_one_are_named(world: Any, my_scheduler: Any) -> None:
    class Here:
        @hookimpl
        def trivet_step_finished(self, event: Any) -> None: ...

    registry = world.registry(None, my_scheduler, Here())
    with pytest.raises(PluginError) as caught:
        registry.plugin_set()
    first, second = caught.value.problems
    for problem, name in ((first, "MyScheduler"), (second, "Here")):
        assert f"plugin '{name}'" in problem
        assert 'trivet_import = ("package.module:Class", {options})' in problem
    assert registry.freeze().has_observers("step_finished")  # in this process they work


@pytest.mark.parametrize("named", ["watching:Watcher", ("watching.Watcher", {}), ("watching:Watcher", None)])
def test_a_wrong_import_path(world: Any, named: Any) -> None:
    class Here:
        trivet_import = named

        @hookimpl
        def trivet_step_finished(self, event: Any) -> None: ...

    with pytest.raises(PluginError, match="trivet_import must be"):
        world.registry(None, Here()).plugin_set()


def test_a_local_option_model_cannot_travel(world: Any) -> None:
    class LocalOptions(Options):
        size: int = 1

    registry = world.registry(None, Provider("model", "mine", "fakes:Model", options=LocalOptions))
    with pytest.raises(PluginError, match="cannot be imported in a worker process"):
        registry.plugin_set()
