"""Who is next and who makes room: policies by themselves, and how a configuration names them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

import numpy as np
import pytest
from engine_kit import config, drain, engine, greedy, prompts

from trivet.engine import Engine
from trivet.errors import PluginError, RequestError
from trivet.hookspecs import hookimpl
from trivet.plan import Int32
from trivet.policies import SchedulingPolicy, VictimPolicy
from trivet.provider import Component
from trivet.state import Request, RequestTable
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_continuous.victims import LeastComputed, LeastPriority, Newest
from trivet_schemas.errors import ConfigError
from trivet_schemas.options import Options
from trivet_schemas.yaml_io import load_config_file


def scheduler(**options: Any) -> dict[str, Any]:
    return {"use": "continuous", "max_num_seqs": 1, "max_num_batched_tokens": 64} | options


def order_of_ends(policy: Any, requests: list[dict[str, Any]], **options: Any) -> list[str]:
    """One runs at a time, so they end in the order of their admission."""
    with engine(scheduler=scheduler(policy=policy, **options)) as e:
        for number, request in enumerate(requests):
            fields = {"prompt_token_ids": [number + 1] * request.pop("length", 4)} | request
            e.add_request(str(number), fields.pop("prompt_token_ids"), fields.pop("params", greedy(3)), **fields)
        return list(drain(e))


def test_fcfs_takes_requests_as_they_come() -> None:
    assert order_of_ends("fcfs", [{"priority": 3}, {"length": 9}, {"priority": 1}]) == ["0", "1", "2"]


def test_priority_takes_the_least_and_then_the_earliest() -> None:
    assert order_of_ends("priority", [{"priority": p} for p in (2, 1, 2, 0, 1)]) == ["3", "1", "4", "0", "2"]


def test_shortest_first_goes_by_prompt_or_by_total_length() -> None:
    requests = [{"length": 9, "params": greedy(1)}, {"length": 2, "params": greedy(20)}, {"length": 5}]
    times = {"arrival_time": 100.0}
    assert order_of_ends("shortest_first", [r | times for r in requests]) == ["1", "2", "0"]
    by_total = {"use": "shortest_first", "measure": "total"}
    assert order_of_ends(by_total, [r | times for r in requests]) == ["2", "0", "1"]


def test_shortest_first_lets_a_long_request_age() -> None:
    requests = [{"length": 2, "arrival_time": 107.0}, {"length": 32, "arrival_time": 100.0}]
    young = {"use": "shortest_first", "ageing": 4}
    old = {"use": "shortest_first", "ageing": 5}
    assert order_of_ends(young, [dict(r) for r in requests]) == ["0", "1"]
    assert order_of_ends(old, [dict(r) for r in requests]) == ["1", "0"]


def test_deadline_takes_what_is_due_first() -> None:
    due = [{"params": greedy(3, extra_args={"deadline": 9})}, {"extra": {"deadline": b"2.5"}}, {}]
    assert order_of_ends("deadline", [dict(r) for r in due]) == ["1", "0", "2"]
    assert order_of_ends({"use": "deadline", "default": 4}, [dict(r) for r in due]) == ["1", "2", "0"]


@pytest.mark.parametrize("given", ["soon", -1, 0, True, float("inf"), [3]])
def test_a_deadline_that_is_no_number_of_seconds_is_refused(given: Any) -> None:
    with engine(scheduler=scheduler(policy="deadline")) as e:
        with pytest.raises(RequestError, match="^extra_args.deadline: must be a number of seconds above 0, got ") as no:
            e.add_request("bad", [1, 2], greedy(3, extra_args={"deadline": given}))
        assert no.value.param == "extra_args.deadline"
        with pytest.raises(RequestError, match=r"^extra\['deadline'\]: must be a number of seconds above 0, got 'x'$"):
            e.add_request("bad", [1, 2], greedy(3, extra_args={"deadline": 5}), extra={"deadline": b"x"})
        e.add_request("good", [1, 2], greedy(3))
        assert list(drain(e)) == ["good"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("fair_shared", "plugins.scheduler.policy: unknown scheduling_policy 'fair_shared'; did you mean 'fair_share'"),
        ({"use": "priority", "preemptoin": True}, "plugins.scheduler.policy.preemptoin.*did you mean 'preemption'"),
        ({"use": "shortest_first", "ageing": -2}, "plugins.scheduler.policy.ageing.*greater than 0"),
        ({"use": "fcfs", "ageing": 1}, "plugins.scheduler.policy.ageing"),
        ({"preemption": True}, "plugins.scheduler.policy: .*must name a policy"),
    ],
)
def test_a_bad_policy_is_named_with_its_place(choice: Any, message: str) -> None:
    with pytest.raises((PluginError, ConfigError), match=message):
        Engine(config(scheduler=scheduler(policy=choice)), [fakes])


def test_a_bad_victim_is_named_with_its_place() -> None:
    with pytest.raises(PluginError, match="plugins.scheduler.victim: .*did you mean 'least_computed'"):
        Engine(config(scheduler=scheduler(victim="least_computd")), [fakes])


@pytest.mark.parametrize("option", ["policy", "victim"])
def test_an_unknown_policy_is_named_with_its_line_or_its_override(option: str, tmp_path: Path) -> None:
    path = f"plugins.scheduler.{option}"
    file = tmp_path / "config.yaml"
    values = config(scheduler=scheduler())
    values["plugins"]["scheduler"][option] = "nobody"
    file.write_text(json.dumps(values, indent=1))
    (line,) = [number for number, text in enumerate(file.read_text().split("\n"), 1) if "nobody" in text]
    with pytest.raises(PluginError, match=rf"config.yaml: {path} \(line {line}\): unknown .* 'nobody'"):
        Engine(load_config_file(file), [fakes])
    with pytest.raises(PluginError, match=rf"^{path} \(from --set {path}=nothing\): unknown .* 'nothing'"):
        Engine(load_config_file(file, [f"{path}=nothing"]), [fakes])


class StrictOptions(Options):
    odd: bool = False


class Parity(SchedulingPolicy):
    """Even prompts first, or odd ones."""

    options_model = StrictOptions

    def key(self, request: Request) -> Any:
        return request.num_prompt % 2 != self.options.odd


class SecondLast(VictimPolicy):
    def choose(self, slots: Int32, table: RequestTable) -> int:
        return int(slots[max(len(slots) - 2, 0)])


def longest(weight: int = 1) -> Any:
    return lambda request: -weight * request.num_prompt


def nonsense() -> int:
    return 5


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A plugin of somebody else's."""
    module = ModuleType("outside_policies")
    vars(module).update(Parity=Parity, SecondLast=SecondLast, longest=longest, nonsense=nonsense)

    @hookimpl
    def trivet_components() -> list[Component]:
        policies = {"parity": "Parity", "longest": "longest", "nonsense": "nonsense"}
        found = [Component("scheduling_policy", name, f"outside_policies:{path}") for name, path in policies.items()]
        return [*found, Component("victim_policy", "second_last", "outside_policies:SecondLast")]

    vars(module)["trivet_components"] = trivet_components
    monkeypatch.setitem(sys.modules, "outside_policies", module)
    return module


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("parity", ["1", "0", "2"]),
        ({"use": "parity", "odd": True}, ["0", "2", "1"]),
        ("longest", ["2", "1", "0"]),
        ({"use": "longest", "weight": -1}, ["0", "1", "2"]),
    ],
)
def test_policies_of_other_plugins(outside: ModuleType, choice: Any, expected: list[str]) -> None:
    with engine(outside, scheduler=scheduler(policy=choice)) as e:
        for number, length in enumerate((3, 6, 9)):
            e.add_request(str(number), [number] * length, greedy(2))
        assert list(drain(e)) == expected


def test_options_that_a_plain_function_does_not_take_are_named(outside: ModuleType) -> None:
    roles = config(scheduler=scheduler(policy={"use": "longest", "wait": 2}))
    with pytest.raises(PluginError, match="plugins.scheduler.policy: scheduling_policy 'longest'.*'wait'"):
        Engine(roles, [fakes, outside])


def test_a_factory_that_makes_no_policy_is_named(outside: ModuleType) -> None:
    with pytest.raises(PluginError, match="plugins.scheduler.policy: the factory made 5"):
        Engine(config(scheduler=scheduler(policy="nonsense")), [fakes, outside])


def test_a_victim_policy_of_another_plugin_is_asked(outside: ModuleType) -> None:
    cache = {"use": "paged", "block_size": 4, "num_blocks": 26}
    work = {str(i): (prompt, 30) for i, prompt in enumerate(prompts(8))}
    with engine(outside, cache=cache, scheduler=scheduler(victim="second_last", max_num_seqs=8)) as e:
        for request_id, (prompt, count) in work.items():
            e.add_request(request_id, prompt, greedy(count))
        done = drain(e)
    assert sum(request.num_preemptions for request in done.values()) > 0
    assert all(done[i].output_ids == reference_tokens(prompt, count) for i, (prompt, count) in work.items())


def make_table(computed: list[int], priorities: list[int]) -> tuple[Int32, RequestTable]:
    table = RequestTable(len(computed), 64)
    for number, (tokens, priority) in enumerate(zip(computed, priorities, strict=True)):
        request = Request(str(number), np.zeros(50, np.int32), greedy(4), 54, 0, index=number, priority=priority)
        slot = table.assign(request, (), 0)
        table.num_computed[slot] = tokens
    return table.order, table


def test_whom_each_victim_policy_chooses() -> None:
    slots, table = make_table([30, 10, 20, 10, 40], [1, 5, 0, 5, 2])
    assert Newest().choose(slots, table) == slots[4]
    assert LeastPriority().choose(slots, table) == slots[3]
    assert LeastComputed().choose(slots, table) == slots[3]
    assert LeastComputed().order(slots, table).tolist() == slots[[4, 0, 2, 1, 3]].tolist()
    assert Newest().order(slots, table).tolist() == slots.tolist()
