"""``trivet plugins``: list, show, check."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest
from launcher_kit import Run, Site

from trivet.registry import Catalog

_OBSERVER = """
    @hookimpl(wrapper=True)
    def trivet_schedule(inputs):
        return (yield)

    @hookimpl
    def trivet_requests_finished(event):
        pass
"""


def test_the_list_names_the_provider_of_every_role_and_why(site: Site, run: Run) -> None:
    result = run("plugins", "list")
    assert result.code == 0
    lines = {line.split()[0]: line for line in result.out.splitlines() if line.strip()}
    assert "continuous" in lines["scheduler"]
    assert "auto" in lines["scheduler"]
    assert "trivet" in lines["scheduler"]
    assert "optional" in lines["connector"]
    assert "acme-fakes 1.0" in lines["fakes"]
    assert "inactive" in lines["fakes"]


def test_a_configuration_decides_what_is_listed(site: Site, run: Run) -> None:
    config = site.config()
    result = run("plugins", "list", config, "--set", "plugins.scheduler.use=static", "--json")
    assert result.code == 0
    report = json.loads(result.out)
    chosen = {role["role"]: [one["provider"] for one in role["chosen"]] for role in report["roles"]}
    assert chosen["scheduler"] == ["static"]
    assert chosen["model"] == ["fake"]
    assert chosen["cache"] == ["paged"]
    plugins = {plugin["name"]: plugin for plugin in report["plugins"]}
    assert plugins["fakes"]["active"]
    assert plugins["fakes"]["distribution"] == "acme-fakes"
    assert plugins["fakes"]["version"] == "1.0"
    assert not plugins["continuous"]["active"]
    (model,) = (role["chosen"][0] for role in report["roles"] if role["role"] == "model")
    assert model["options"]["vocab_size"] == 77
    assert "configuration" in model["why"]


def test_a_configuration_that_names_none_of_them_is_told_what_is_installed(site: Site, run: Run) -> None:
    result = run("plugins", "list", site.config(plugins={"scheduler": "contiunous"}))
    assert result.code == 2
    assert "scheduler: continuous" in result.out
    assert "did you mean 'continuous'" in result.err


def test_overrides_need_a_configuration(run: Run) -> None:
    result = run("plugins", "list", "--set", "plugins.scheduler.use=static")
    assert result.code == 2
    assert "CONFIG" in result.err


def test_a_plugin_is_shown_with_its_options(run: Run) -> None:
    result = run("plugins", "show", "continuous")
    assert result.code == 0
    (line,) = (line for line in result.out.splitlines() if line.split()[:1] == ["max_num_batched_tokens"])
    assert "2048" in line
    assert "Token budget of a step" in line
    assert "scheduling_policy" in result.out
    assert "trivet_providers" in result.out


def test_what_a_provider_needs_can_be_installed(run: Run) -> None:
    needs = {
        tuple(line.split("  needs ")[1].split(maxsplit=1))
        for plugin in ("native", "transformers", "triton")
        for line in run("plugins", "show", plugin).out.splitlines()
        if line.startswith("  needs ")
    }
    assert needs == {
        ("torch", "brought by trivet itself"),
        ("transformers", "brought by trivet itself"),
        ("triton", 'extra "triton"'),
    }
    extras = set(importlib.metadata.metadata("trivet").get_all("Provides-Extra") or ())
    named = {extra for plugin in Catalog().plugins for offer in plugin.offers for extra in _extras(offer)}
    assert "triton" in named
    assert named <= extras


def _extras(offer: Any) -> list[str]:
    is_ours = offer.provider is not None and offer.plugin.distribution == "trivet"
    return [extra for extra in offer.provider.requires.values() if extra] if is_ours else []


def test_a_plugin_is_found_by_the_name_of_its_provider(site: Site, run: Run) -> None:
    result = run("plugins", "show", "fake", "--json")
    (shown,) = json.loads(result.out)
    assert shown["name"] == "fakes"
    providers = {provider["role"]: provider for provider in shown["providers"]}
    assert set(providers) == {"runner", "model", "attention", "sampler", "tokenizer"}
    options = {option["name"]: option for option in providers["model"]["options"]}
    assert options["vocab_size"]["default"] == 64
    assert options["vocab_size"]["type"] == "integer"
    assert options["vocab_size"]["description"] == "Rows of the LM head."


def test_hooks_are_shown_in_the_order_of_calls(site: Site, run: Run) -> None:
    site.plugin("watcher", _OBSERVER)
    site.plugin("second", _OBSERVER)
    config = site.config(plugins={"extension": [{"use": "watcher"}, {"use": "second"}]})
    orders = {}
    for name in ("watcher", "second"):
        (shown,) = json.loads(run("plugins", "show", name, config, "--json").out)
        assert shown["active"]
        orders[name] = {hook["hook"]: (hook["kind"], hook["order"]) for hook in shown["hooks"]}
    assert orders["watcher"]["trivet_requests_finished"] == ("observes", 1)
    assert orders["second"]["trivet_requests_finished"] == ("observes", 2)
    assert {orders[name]["trivet_schedule"] for name in orders} == {("wraps", 1), ("wraps", 2)}


def test_an_unknown_name_is_answered_with_a_near_one(run: Run) -> None:
    result = run("plugins", "show", "continous")
    assert result.code == 2
    assert "did you mean 'continuous'" in result.err


def test_a_check_without_problems(site: Site, run: Run) -> None:
    result = run("plugins", "check")
    assert (result.code, result.err) == (0, "")
    assert "no problems" in result.out


_BROKEN = {
    "failing": ("import no_such_module_at_all", "no_such_module_at_all"),
    "misspelt": (
        """
        @hookimpl
        def trivet_requests_finished(evnt=None):
            pass
        """,
        "evnt",
    ),
    "absent": (
        """
        @hookimpl
        def trivet_providers():
            return [Provider("scheduler", "absent", "no_such_module_at_all:Scheduler")]
        """,
        "no_such_module_at_all",
    ),
}


def test_a_check_reports_the_problems_of_everything_installed(site: Site, run: Run) -> None:
    for name, (source, _) in _BROKEN.items():
        site.plugin(name, source)
    result = run("plugins", "check")
    assert result.code == 1
    for name, (_, problem) in _BROKEN.items():
        assert any(name in line and problem in line for line in result.err.splitlines()), result.err
    assert "3 problems" in result.out
    report = json.loads(run("plugins", "check", "--json").out)
    assert len(report["installed"]) == 3


def test_what_a_configuration_does_not_use_is_no_obstacle(site: Site, run: Run) -> None:
    site.plugin("failing", _BROKEN["failing"][0])
    result = run("plugins", "check", site.config())
    assert result.code == 0
    assert "note: " in result.err
    assert "no_such_module_at_all" in result.err
    assert "no problems" in result.out
    assert "no_such_module_at_all" in run("plugins", "list").err


@pytest.mark.parametrize("command", [("plugins", "check"), ("config", "check"), ("generate", "-p", "a"), ("chat",)])
def test_what_a_configuration_uses_stops_it(site: Site, run: Run, command: tuple[str, ...]) -> None:
    site.plugin("absent", _BROKEN["absent"][0])
    config = site.config(plugins={"scheduler": "absent"})
    result = run(*command, config)
    assert result.code == 2
    assert "no_such_module_at_all" in result.err
    assert "acme-absent 1.0" in result.err
    assert "Traceback" not in result.err
