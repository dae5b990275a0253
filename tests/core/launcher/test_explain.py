"""``trivet explain``: what requests waited for, and what a watchdog's dump says."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from launcher_kit import Run, Site

from trivet import SamplingParams
from trivet.context import Hold
from trivet.engine import Engine

_GREEDY = {"sampling": {"temperature": 0, "max_tokens": 8}}
_SMALL = {"scheduler": {"use": "continuous", "max_num_seqs": 2, "max_num_batched_tokens": 16}}


@pytest.fixture
def requests(site: Site) -> Path:
    return site.write("requests.jsonl", *({"id": f"r{i}", "prompt": "hello there" * (i + 1)} for i in range(4)))


def test_every_request_has_a_line_and_one_its_steps(site: Site, run: Run, requests: Path) -> None:
    result = run("explain", site.config(plugins=_SMALL, generate=_GREEDY), "--input", requests)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[1].split()[:5] == ["request", "ended", "steps", "ran", "waited"]
    table = [line.split() for line in lines[2:6]]
    assert sorted(row[0] for row in table) == ["r0", "r1", "r2", "r3"]
    for row in table:
        assert row[1] == "length"
        assert int(row[2]) == int(row[3]) + int(row[4])
    late = next(line for line in lines[2:6] if line.split()[0] == "r3")
    assert "turn" in late
    early = next(line for line in lines[2:6] if line.split()[0] == "r0")
    assert early.endswith("nothing")
    detail = result.out[result.out.index("request r3") :]
    assert "44 of the prompt, 8 of the output" in detail
    assert "waited: turn" in detail
    assert "max_num_seqs=2" in detail
    events = detail[detail.index("what happened") :]
    assert events.index("queued") < events.index("admitted") < events.index("first token") < events.index("finished")


def test_a_request_can_be_named(site: Site, run: Run, requests: Path) -> None:
    config = site.config(plugins=_SMALL, generate=_GREEDY)
    result = run("explain", config, "-i", requests, "--request", "r0")
    assert "request r0" in result.out
    result = run("explain", config, "-i", requests, "-r", "nobody")
    assert result.code == 2
    assert "there is no request 'nobody'; there are 'r" in result.err
    assert all(f"'r{i}'" in result.err for i in range(4))


def test_an_id_that_is_not_there_names_ten_of_those_that_are(site: Site, run: Run) -> None:
    path = site.write("many.jsonl", *({"id": f"r{i}", "prompt": "hello"} for i in range(13)))
    result = run("explain", site.config(generate=_GREEDY), "-i", path, "-r", "nobody", "--json")
    assert (result.code, result.out) == (2, "")
    assert len(re.findall(r"'r\d+'", result.err)) == 10
    assert "and 3 more" in result.err
    result = run("explain", site.config(generate=_GREEDY), "-i", site.write("none.jsonl"), "-r", "nobody")
    assert "there is no request 'nobody'; there is none at all" in result.err


def test_json_has_an_object_per_request_whose_numbers_add_up(site: Site, run: Run) -> None:
    path = site.write("in.jsonl", {"id": "a", "prompt": "abc"}, {"id": "b", "prompt": "defg", "n": 2, "temperature": 1})
    result = run("explain", site.config(plugins=_SMALL, generate=_GREEDY), "-i", path, "--json")
    assert result.code == 0
    assert [(one["request_id"], one["line"]) for one in result.records] == [("a", 1), ("b#0", 2), ("b#1", 2)]
    for one in result.records:
        assert one["steps"] == one["steps_run"] + sum(wait["steps"] for wait in one["waits"].values())
        assert sum(span["steps"] for span in one["spans"]) == one["steps"]
        assert one["num_output"] == 8
    assert "parent" in result.records[2]["waits"]


def test_a_line_that_is_refused_and_a_request_that_fails(site: Site, run: Run) -> None:
    path = site.write("in.jsonl", "no json", {"id": "good", "prompt": "abc"})
    result = run("explain", site.config(generate=_GREEDY), "-i", path)
    assert result.code == 2
    assert "line 1" in result.err
    rows = {line.split()[0]: line.split()[1] for line in result.out.splitlines()[2:4]}
    assert rows == {"line-1": "refused", "good": "length"}
    path = site.write("in.jsonl", {"id": "bad", "prompt": "xyz"})
    result = run("explain", site.config(generate=_GREEDY, plugins=site.spoil("x")), "-i", path)
    assert result.code == 1
    assert "line 1" in result.err
    assert "error" in result.out


def test_the_row_of_a_refused_request_says_why(site: Site, run: Run) -> None:
    path = site.write("in.jsonl", {"id": "long", "prompt": "abc" * 1000}, {"id": "good", "prompt": "abc"})
    result = run("explain", site.config(generate=_GREEDY), "-i", path, "--request", "long")
    assert result.code == 2
    told = result.out[result.out.index("request long") :]
    assert "refused" in told
    assert "shorten the prompt" in told
    result = run("explain", site.config(generate=_GREEDY), "-i", path, "--json")
    kinds = {one["request_id"]: one for one in result.records}
    assert kinds["long"].keys() == kinds["good"].keys()
    assert (kinds["long"]["finish_reason"], kinds["long"]["line"], kinds["long"]["steps"]) == ("refused", 1, 0)


def test_an_empty_input_has_nothing_to_tell(site: Site, run: Run) -> None:
    result = run("explain", site.config(generate=_GREEDY), "-i", site.write("none.jsonl"))
    assert result.code == 0


@pytest.fixture
def dump(site: Site) -> Path:
    """What an engine leaves whose request nobody releases."""
    path = site.folder / "dump.json"
    roles: dict[str, Any] = {r: {"use": "fake"} for r in ("runner", "attention", "sampler", "tokenizer", "model")}
    settings = {"model": "x", "max_model_len": 64, "watchdog": {"seconds": 1e-6, "dump": str(path)}, "plugins": roles}
    engine = Engine(settings)
    engine.add_request("stuck", [1, 2, 3], SamplingParams(max_tokens=4))
    engine.context.hold("stuck", Hold("remote", "router", "waits for the other side", time.monotonic(), {"tokens": 3}))
    while engine.fault is None:
        engine.step()
    engine.shutdown()
    return path


def test_a_dump_is_told_in_words(run: Run, dump: Path) -> None:
    result = run("explain", dump)
    assert result.code == 0
    assert "the engine gave up" in result.out
    assert "waits for the other side" in result.out
    assert "request stuck" in result.out
    assert "waited: remote" in result.out
    assert "tokens=3" in result.out
    assert "last steps" in result.out
    assert "MainThread" in result.out
    assert json.loads(run("explain", dump, "--json").out)["reason"].startswith("nothing has happened")
    assert run("explain", dump, "--request", "nobody").code == 2


@pytest.mark.parametrize("text", ["model: demo\n", "[]", '{"reason": "x"}', "{"])
def test_a_file_that_is_no_dump_is_refused(site: Site, run: Run, text: str) -> None:
    path = site.folder / "other"
    path.write_text(text, encoding="utf-8")
    result = run("explain", path)
    assert result.code == 2
    assert "is no dump of the watchdog; for a configuration, give --input" in result.err


def test_wrong_usage(site: Site, run: Run) -> None:
    assert run("explain", site.folder / "missing.json").code == 2
    result = run("explain", site.config(), "--set", "seed=1")
    assert result.code == 2
    assert "goes with --input" in result.err
    result = run("explain", site.config(generate=_GREEDY), "--input", site.folder / "missing.jsonl")
    assert result.code == 2
    assert "cannot be read" in result.err
