"""Each suite finds what it is there to find: providers with one fault each fail, and the message names the rule."""

from __future__ import annotations

from typing import Any

import conformance_cache_faults  # noqa: F401 - its classes are listed in FAULTS too
import conformance_faults
import conformance_providers
import pytest
from hypothesis import Phase

from trivet.provider import Provider
from trivet.roles import Cache, Scheduler
from trivet.testing import suites
from trivet.testing.suites._base import place

SETTINGS: dict[str, dict[str, Any]] = {
    "CacheSuite": {"on_demand": True, "finds_prefixes": True, "examples": 400},
    "SchedulerSuite": {"arrival_order": True, "steady_decodes": True, "tells_waits": True},
    "ModelSuite": {"attention": "fake"},
    "SamplerSuite": dict.fromkeys(
        (
            *("top_k", "top_p", "min_p", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
            *("repetition_penalty", "frequency_penalty", "presence_penalty", "logprob_token_ids"),
        ),
        False,
    ),
    "TokenizerSuite": {"texts": ("The capital of France is", "one, two, three, four, five, six")},
    "LogitsProcessorSuite": {"cases": ({"no_repeat": 1}, {"no_repeat": 5})},
}


def suite_of(name: str, cls: type, **settings: Any) -> Any:
    base = getattr(suites, name)
    provider = Provider(base.role, "faulty_one", f"{cls.__module__}:{cls.__name__}")
    plugins = {"plugins": (provider, conformance_providers), "use": "faulty_one"}
    given = plugins | SETTINGS.get(name, {}) | settings
    if hasattr(cls, "windows"):
        given |= {"windows": cls.windows, "finds_prefixes": False, "tiers": getattr(cls, "tiers", ())}
    if name == "SchedulerSuite":
        given["sizes"] = lambda self, max_num_seqs, max_num_batched_tokens: {}

    def budget(self: Any, **changes: Any) -> Any:
        return base.budget(self, **{"phases": [Phase.generate]} | changes)  # there is no need for the smallest example

    return type(f"Test{cls.__name__}", (base,), given | {"budget": budget})()


@pytest.mark.parametrize(
    ("name", "cls", "test", "arguments", "words"),
    conformance_faults.FAULTS,
    ids=[cls.__name__ for _, cls, _, _, _ in conformance_faults.FAULTS],
)
def test_a_fault_is_found(name: str, cls: type, test: str, arguments: dict[str, Any], words: str) -> None:
    settings = {"arrival_order": False} if test == "test_no_request_starves" else {}
    with pytest.raises((AssertionError, pytest.fail.Exception)) as caught:
        getattr(suite_of(name, cls, **settings), test)(**arguments)
    message = str(caught.value)
    assert words in message
    if "DID NOT RAISE" not in words:
        assert "documented at: " in message


def test_the_base_of_the_faulty_schedulers_passes() -> None:
    suite = suite_of("SchedulerSuite", conformance_faults._Scheduler)
    suite.test_tokens_are_those_of_the_naive_loop(**conformance_faults.LOOP)
    suite.test_no_request_starves()


def test_documented_places_exist() -> None:
    assert place(Cache.extend) == "trivet.roles.Cache.extend"
    assert place(Cache) == "trivet.roles.Cache"
    assert place(Scheduler.limits) == "trivet.roles.Scheduler.limits"
    assert place("docs/contracts.md") == "docs/contracts.md"


def test_promises_decide_which_tests_there_are() -> None:
    class Modest(suites.CacheSuite):
        use = "sharing"

    class Bold(Modest):
        finds_prefixes = True

    class ModestAgain(Bold):
        finds_prefixes = False

    found = [cls.test_a_prompt_is_found_again is not None for cls in (Modest, Bold, ModestAgain)]
    assert found == [False, True, False]
