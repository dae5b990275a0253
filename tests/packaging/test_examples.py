"""The examples run as their first lines say, and the scheduler among them is right when memory is short."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trivet import Engine, SamplingParams
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def custom_scheduler(repository: Path) -> ModuleType:
    path = repository / "examples" / "custom_scheduler.py"
    spec = importlib.util.spec_from_file_location("custom_scheduler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.model
def test_the_quickstart_answers_every_prompt(repository: Path, demo_model: Path) -> None:
    command = shutil.which("trivet", path=sysconfig.get_path("scripts"))
    assert command is not None
    quickstart = repository / "examples" / "quickstart.yaml"
    lines = _run(command, "generate", str(quickstart), "--json", "--max-tokens", "8").splitlines()
    answers = {record["prompt"]: record["outputs"][0]["text"] for record in map(json.loads, lines)}
    assert len(answers) == 4
    assert answers["The first ten prime numbers are 2, 3, 5,"].startswith(" 7, 1")
    assert all(answers.values())


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize(
    ("example", "shown"), [("offline.py", "The capital of France is"), ("custom_scheduler.py", "202 prompt tokens")]
)
def test_the_python_examples_run_with_the_demo_model(
    repository: Path, demo_model: Path, example: str, shown: str
) -> None:
    assert shown in _run(sys.executable, str(repository / "examples" / example))


def _drain(engine: Engine) -> dict[str, Any]:
    done: dict[str, Any] = {}
    for _ in range(5000):
        if not engine.has_work:
            return done
        done |= {end.request.request_id: end.request for end in engine.step().finished}
        engine.check_integrity()
    raise AssertionError("no end in sight")


@pytest.fixture
def config() -> dict[str, Any]:
    plugins: dict[str, Any] = dict.fromkeys(("model", "attention", "sampler", "runner", "tokenizer"), "fake")
    # Thirty blocks of four tokens: far less than the requests below need at once.
    plugins["cache"] = {"use": "paged", "block_size": 4, "num_blocks": 31}
    return {"model": "fake", "max_model_len": 96, "plugins": plugins}


def test_the_custom_scheduler_preempts_and_changes_no_token(
    custom_scheduler: ModuleType, config: dict[str, Any]
) -> None:
    prompts = {f"r{n}": [(7 * n + i) % 64 for i in range(3 + 5 * n % 40)] for n in range(12)}
    scheduler = custom_scheduler.ShortestFirst(max_num_seqs=6, max_num_batched_tokens=24)
    engine = Engine(config, [fakes, scheduler])
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=30))
    done = _drain(engine)
    engine.shutdown()
    assert sum(request.num_preemptions for request in done.values()) > 0
    for name, prompt in prompts.items():
        assert done[name].output_ids == reference_tokens(prompt, 30)


def test_the_custom_scheduler_takes_the_shortest_prompt_first(
    custom_scheduler: ModuleType, config: dict[str, Any]
) -> None:
    engine = Engine(config, [fakes, custom_scheduler.ShortestFirst(max_num_seqs=1, max_num_batched_tokens=64)])
    for name, length in (("long", 40), ("short", 4), ("middle", 20)):
        engine.add_request(name, list(range(length)), SamplingParams(temperature=0, max_tokens=2))
    engine.abort(["middle"])
    done = _drain(engine)
    engine.shutdown()
    finished = sorted((r for r in done.values() if r.finish_reason == "length"), key=lambda r: r.finished_time)
    assert [request.request_id for request in finished] == ["short", "long"]
