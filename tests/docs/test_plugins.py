"""The programs of docs/plugins.md run, and what the page quotes is what Trivet says."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trivet.engine import Engine
from trivet.errors import PluginError, RequestError
from trivet.provider import API_VERSION
from trivet.registry import DEPRECATION_POLICY, Registry
from trivet.testing import fakes, suites
from trivet.testing.fake_model import reference_logits, reference_tokens
from trivet_schemas.config import EngineConfig
from trivet_schemas.sampling import SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FAKE = {role: {"use": "fake"} for role in ("model", "attention", "sampler", "runner", "tokenizer")}


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(PAGE.read_text()) if kind == language]


def programs() -> dict[str, str]:
    """File name → text; the first line of a program on the page is its name."""
    return {text.split("\n", 1)[0].removeprefix("# "): text for text in blocks("python")}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a program of the page by its name."""
    for name, text in programs().items():
        # Line numbers are counted without the line that names the file.
        (tmp_path / name).write_text(text.split("\n", 1)[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [Path(name).stem for name in programs()]
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def run(plugins: list[Any], roles: dict[str, Any], requests: dict[str, tuple[list[int], Any]]) -> dict[str, Any]:
    """Ended requests by id, in the order in which they ended."""
    settings: dict[str, Any] = {"executor": {"use": "inline"}, "cache": {"use": "paged", "block_size": 4}}
    settings["scheduler"] = {"use": "continuous", "max_num_seqs": 2}
    config = {"model": "fake", "max_model_len": 100, "plugins": FAKE | settings | roles}
    engine = Engine(config, [fakes, *plugins])
    try:
        for request_id, (prompt, params) in requests.items():
            engine.add_request(request_id, prompt, params)
        done: dict[str, Any] = {}
        while engine.has_work:
            done |= {end.request.request_id: end.request for end in engine.step().finished}
        done["registry"] = engine.parts.registry
        return done
    finally:
        engine.shutdown()


def greedy(count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, **fields)


def yaml_plugins(word: str) -> dict[str, Any]:
    """The ``plugins`` of the page's configuration that has ``word``."""
    (text,) = [text for text in blocks("yaml") if word in text]
    return yaml.safe_load(text)["plugins"]


def test_the_scheduling_policy(modules: Any) -> None:
    roles = yaml_plugins("policy: shortest")
    roles["scheduler"]["max_num_seqs"] = 1
    requests = {str(n): ([1] * n, greedy(3)) for n in (20, 5, 30, 1)}
    done = run([modules("shortest")], roles, requests)
    assert [name for name in done if name != "registry"] == ["1", "5", "20", "30"]


def test_the_victim_policy(modules: Any) -> None:
    roles = yaml_plugins("policy: shortest") | {"cache": {"use": "paged", "block_size": 4, "num_blocks": 26}}
    requests = {str(n): ([n] * (n + 1), greedy(60)) for n in range(8)}
    done = run([modules("shortest")], roles, requests)
    registry = done.pop("registry")
    assert registry.component_names("victim_policy") == [
        "least_computed",
        "least_priority",
        "most_blocks",
        "newest",
        "shortest_so_far",
    ]
    assert sum(request.num_preemptions for request in done.values()) > 0
    assert all(done[i].output_ids == reference_tokens(prompt, 60) for i, (prompt, _) in requests.items())


def test_the_suite_of_the_page_passes(modules: Any) -> None:
    suite = modules("test_policy").TestShortest
    suite.plugins = (modules("shortest"),)
    assert issubclass(suite, suites.SchedulerSuite)
    suite().test_tokens_are_those_of_the_naive_loop(8, 32, {"use": "paged", "block_size": 4, "num_blocks": 26})
    suite().test_preemption_comes_to_an_end(False)
    assert suite.test_no_request_starves is None


def test_the_logits_wrapper(modules: Any) -> None:
    prompt = [3, 1, 4]
    done = run([modules("no_echo")], yaml_plugins("use: no_echo"), {"r": (prompt, greedy(40))})
    tokens = list(prompt)
    for token in done["r"].output_ids:
        logits = reference_logits(tokens, 64, [None])[-1]
        logits[tokens[-1]] -= 3.0
        assert token == int(logits.argmax())
        tokens.append(token)


def test_the_observer(modules: Any) -> None:
    tally = modules("tally")
    done = run([tally], {}, {str(n): ([n] * 5, greedy(4)) for n in range(3)})
    (found,) = [plugin.target for plugin in done["registry"].active if isinstance(plugin.target, tally.Tally)]
    assert found.ends == {"length": 3}
    assert found.computed == 3 * (5 + 3)


def test_the_fault(modules: Any) -> None:
    roles = {"logits_processor": [{"use": "fussy"}]}
    extra = {"extra_args": {"fussy": True}}
    requests = {"good": ([1, 2], greedy(9)), "bad": ([7, 7], greedy(9, **extra)), "fine": ([5, 6], greedy(2, **extra))}
    done = run([modules("fussy")], roles, requests)
    assert (done["bad"].finish_reason, done["bad"].message) == ("error", "token 7 twice in a row")
    assert done["good"].output_ids == reference_tokens([1, 2], 9)
    assert done["fine"].finish_reason == "length"
    with pytest.raises(RequestError, match="must be true or false"):
        run([modules("fussy")], roles, {"r": ([1], greedy(1, extra_args={"fussy": 1}))})


def test_the_errors_look_as_shown(modules: Any, tmp_path: Path) -> None:
    (shown,) = [text for text in blocks("text") if "problems with plugins" in text]
    selections = {"scheduler": {"use": "continuos"}, "cache": {"use": "paged", "block_sise": 4}}
    with pytest.raises(PluginError) as caught:
        Registry(EngineConfig(model="demo", plugins=selections), [modules("bias")], required=())
    said = str(caught.value).replace(f"{tmp_path}/", "")
    said = re.sub(r"bias\.py:(\d+)", lambda match: f"bias.py:{int(match[1]) + 1}", said)
    assert said.strip() == shown.strip()


def test_the_examples_are_short() -> None:
    for name in ("shortest.py", "no_echo.py"):
        assert programs()[name].count("\n") < 50, name


def test_the_page_has_the_version_and_the_policy() -> None:
    text = PAGE.read_text()
    quoted = " ".join(line.removeprefix("> ") for line in text.splitlines() if line.startswith("> "))
    assert quoted == DEPRECATION_POLICY
    assert f"at present {API_VERSION}" in text


def test_the_page_lists_every_suite() -> None:
    text = PAGE.read_text()
    missing = [name for name in suites.__all__ if name not in {"Suite", "ArraySuite"} and f"`{name}`" not in text]
    assert not missing
