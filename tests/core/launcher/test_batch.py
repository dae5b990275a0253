"""``trivet generate --input``: files and pipes of requests."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher_kit import Run, Site, continuation, read_records, texts

from trivet.launcher._session import Session

_GREEDY = {"sampling": {"temperature": 0, "max_tokens": 8}}


def _wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_every_line_gets_a_record(site: Site, run: Run) -> None:
    ids = [3, 1, 4]
    source = site.write(
        "in.jsonl",
        {"prompt": "Hello"},
        {"id": "own", "prompt_token_ids": ids, "max_tokens": 3},
        {"id": 7, "messages": [{"role": "user", "content": "Hi"}], "sampling": {"max_tokens": 2}},
    )
    target = site.folder / "out.jsonl"
    result = run("generate", site.config(generate=_GREEDY), "--input", source, "--output", target)
    assert (result.code, result.out) == (0, "")
    records = sorted(read_records(target), key=lambda record: record["line"])
    assert [(record["id"], record["line"]) for record in records] == [("line-1", 1), ("own", 2), ("7", 3)]
    assert texts(records) == {
        "line-1": continuation("Hello", 8),
        "own": continuation("dbe", 3),
        "7": continuation("user: Hi.assistant: ", 2),
    }
    assert records[1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    assert "3 requests, 13 tokens" in result.err


def test_without_output_the_records_go_to_stdout(site: Site, run: Run) -> None:
    source = site.write("in.jsonl", {"id": "a", "prompt": "Hello"}, {"id": "b", "prompt": "there"})
    result = run("generate", site.config(generate=_GREEDY), "--input", source)
    assert texts(result.records) == {"a": continuation("Hello", 8), "b": continuation("there", 8)}


def test_wrong_lines_are_named_and_the_rest_goes_on(site: Site, run: Run) -> None:
    source = site.write(
        "in.jsonl",
        {"id": "good", "prompt": "Hello"},
        '{"prompt": "cut off',
        {"id": "long", "prompt": "x" * 600},
        {"id": "none", "prompt": ""},
        {"id": "outside", "prompt_token_ids": [5, 1000]},
        {"id": "good", "prompt": "again"},
        {"id": "typo", "prompt": "a", "temprature": 0},
        {"id": "half", "prompt": "\ud800"},
        "",
        {"id": "last", "prompt": "there"},
    )
    target = site.folder / "out.jsonl"
    result = run("generate", site.config(generate=_GREEDY), "--input", source, "--output", target)
    assert result.code == 2
    records = {record["line"]: record for record in read_records(target)}
    assert sorted(records) == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert texts(list(records.values())) == {"good": continuation("Hello", 8), "last": continuation("there", 8)}
    expected = {
        2: (None, "not valid JSON at column"),
        3: ("long", "600 tokens"),
        4: (None, "prompt"),
        5: ("outside", "1000"),
        6: (None, "'good' is the id of line 1 already"),
        7: (None, "did you mean 'temperature'"),
        8: ("half", "Unicode"),
    }
    for line, (id_, problem) in expected.items():
        assert records[line]["id"] == id_
        assert problem in records[line]["error"]
        assert f"error: line {line}: {records[line]['error']}" in result.err
    assert "7 refused" in result.err


def test_a_request_that_fails_as_it_runs_is_recorded(site: Site, run: Run) -> None:
    source = site.write("in.jsonl", {"id": "bad", "prompt": "bbb"}, {"id": "good", "prompt": "ab"})
    result = run("generate", site.config(plugins=site.spoil("b"), generate=_GREEDY), "--input", source)
    assert result.code == 1
    records = {record["id"]: record for record in result.records}
    assert "NaN" in records["bad"]["error"]
    assert records["good"]["outputs"][0]["text"] == continuation("ab", 8)
    assert "line 1: " in result.err


def test_a_file_of_another_kind_does_not_flood_the_terminal(site: Site, run: Run) -> None:
    source = site.write("in.jsonl", *["no json"] * 100)
    result = run("generate", site.config(), "--input", source)
    assert result.code == 2
    assert len(result.records) == 100
    assert len(result.err.splitlines()) < 30


def test_an_id_may_look_like_that_of_another_requests_output(site: Site, run: Run) -> None:
    sampling = {"n": 2, "temperature": 1.0, "max_tokens": 4}
    source = site.write("in.jsonl", {"id": "a", "prompt": "x", **sampling}, {"id": "a#1", "prompt": "y"})
    result = run("generate", site.config(generate=_GREEDY), "--input", source)
    assert result.code == 0
    assert {record["id"]: len(record["outputs"]) for record in result.records} == {"a": 2, "a#1": 1}


def test_requests_are_read_as_the_engine_takes_them(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    step = Session.step

    def watch(session: Session) -> Any:
        nonlocal most
        most = max(most, session.num_unfinished)
        return step(session)

    monkeypatch.setattr(Session, "step", watch)
    source = site.write("in.jsonl", *[{"prompt": "Hello"}] * 50)
    scheduler = {"use": "continuous", "max_num_seqs": 2, "max_num_queued_reqs": 3}
    config = site.config(plugins={"scheduler": scheduler}, generate=_GREEDY)
    result = run("generate", config, "--input", source)
    assert result.code == 0
    assert len(result.records) == 50
    assert 2 <= most <= 8


# ---------------------------------------------------------------- files


def test_an_output_file_that_exists_is_refused_before_anything_is_loaded(site: Site, run: Run) -> None:
    source = site.write("in.jsonl", {"prompt": "Hello"})
    target = site.write("out.jsonl", "precious")
    result = run("generate", site.config(plugins={"executor": "no such"}), "--input", source, "--output", target)
    assert result.code == 2
    assert "--resume" in result.err
    assert "no such" not in result.err
    assert target.read_text(encoding="utf-8") == "precious\n"


@pytest.mark.parametrize(
    ("source", "target", "named"),
    [
        ("missing.jsonl", "out.jsonl", "missing.jsonl"),
        ("in.jsonl", "no/such/out.jsonl", "does not exist"),
        ("in.jsonl", ".", "is a folder"),
        (".", "out.jsonl", "cannot be read"),
    ],
)
def test_files_that_cannot_be_used(site: Site, run: Run, source: str, target: str, named: str) -> None:
    site.write("in.jsonl", {"prompt": "Hello"})
    result = run("generate", site.config(), "-i", site.folder / source, "-o", site.folder / target)
    assert result.code == 2
    assert named in result.err
    assert not (site.folder / "out.jsonl").exists()


def test_a_start_that_fails_leaves_no_output_file(site: Site, run: Run) -> None:
    source = site.write("in.jsonl", {"prompt": "Hello"})
    target = site.folder / "out.jsonl"
    result = run(
        "generate", site.config(plugins={"cache": {"memory": "1KiB"}}, max_model_len=512), "-i", source, "-o", target
    )
    assert result.code == 2
    assert not target.exists()


def test_the_input_cannot_be_the_output(site: Site, run: Run) -> None:
    source = site.write("in.jsonl", {"prompt": "Hello"})
    before = source.read_bytes()
    result = run("generate", site.config(), "-i", source, "-o", source, "--resume")
    assert result.code == 2
    assert "is the input" in result.err
    assert source.read_bytes() == before


def test_resuming_needs_a_file(site: Site, run: Run) -> None:
    source = site.write("in.jsonl", {"prompt": "Hello"})
    result = run("generate", site.config(), "-i", source, "--resume")
    assert result.code == 2
    assert "--resume" in result.err


# ---------------------------------------------------------------- interrupted runs


def _ten(site: Site) -> tuple[Path, dict[str, str]]:
    source = site.write("in.jsonl", *[{"id": f"r{i}", "prompt": f"prompt {i}"} for i in range(10)])
    return source, {f"r{i}": continuation(f"prompt {i}", 8) for i in range(10)}


def test_resuming_skips_what_is_done(site: Site, run: Run) -> None:
    source, expected = _ten(site)
    target = site.folder / "out.jsonl"
    config = site.config(generate=_GREEDY)
    assert run("generate", config, "-i", source, "-o", target).code == 0
    whole = target.read_bytes().splitlines(keepends=True)
    kept = b"".join(whole[:4])
    target.write_bytes(kept)
    result = run("generate", config, "-i", source, "-o", target, "--resume")
    assert result.code == 0
    assert "4 requests are done already" in result.err
    assert target.read_bytes().startswith(kept)
    assert len(read_records(target)) == 10
    assert texts(read_records(target)) == expected


def test_resuming_a_run_that_was_complete_does_nothing(site: Site, run: Run) -> None:
    source, _ = _ten(site)
    target = site.folder / "out.jsonl"
    config = site.config(generate=_GREEDY)
    run("generate", config, "-i", source, "-o", target)
    before = target.read_bytes()
    assert run("generate", config, "-i", source, "-o", target, "--resume").code == 0
    assert target.read_bytes() == before


def test_resuming_without_an_earlier_run_begins(site: Site, run: Run) -> None:
    source, expected = _ten(site)
    target = site.folder / "out.jsonl"
    assert run("generate", site.config(generate=_GREEDY), "-i", source, "-o", target, "--resume").code == 0
    assert texts(read_records(target)) == expected


def test_a_last_line_that_is_cut_off_is_run_again(site: Site, run: Run) -> None:
    source, expected = _ten(site)
    target = site.folder / "out.jsonl"
    config = site.config(generate=_GREEDY)
    run("generate", config, "-i", source, "-o", target)
    for cut in (1, 30):
        target.write_bytes(target.read_bytes()[:-cut])
        result = run("generate", config, "-i", source, "-o", target, "--resume")
        assert result.code == 0
        assert "cut off" in result.err
        assert texts(read_records(target)) == expected
        assert len(read_records(target)) == 10


def test_lines_with_errors_are_tried_again(site: Site, run: Run) -> None:
    source = site.write("in.jsonl", {"id": "a", "prompt": "Hello"}, {"id": "b", "prompt": ""}, "broken")
    target = site.folder / "out.jsonl"
    config = site.config(generate=_GREEDY)
    assert run("generate", config, "-i", source, "-o", target).code == 2
    site.write("in.jsonl", {"id": "a", "prompt": "Hello"}, {"id": "b", "prompt": "there"}, {"id": "c", "prompt": "now"})
    result = run("generate", config, "-i", source, "-o", target, "--resume")
    assert result.code == 0
    assert "2 lines that ended with an error" in result.err
    records = read_records(target)
    assert texts(records) == {"a": continuation("Hello", 8), "b": continuation("there", 8), "c": continuation("now", 8)}
    assert len(records) == 3


@pytest.mark.parametrize("line", ['{"some": "thing"}', "text", "[1]", '{"id": "a", "prompt": "Hello"}'])
def test_a_file_that_another_program_wrote_is_left_alone(site: Site, run: Run, line: str) -> None:
    source, _ = _ten(site)
    target = site.write("out.jsonl", line, line)
    before = target.read_bytes()
    result = run("generate", site.config(), "-i", source, "-o", target, "--resume")
    assert result.code == 2
    assert "line 1" in result.err
    assert target.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_keeps_every_finished_line_and_resumes(site: Site, run: Run, number: int) -> None:
    source, expected = _ten(site)
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    target = site.folder / "out.jsonl"
    config = site.config(generate=_GREEDY)
    with site.start("generate", config, "-i", "-", "-o", target) as process:
        assert process.stdin is not None
        process.stdin.write("".join(lines[:6]))
        process.stdin.flush()
        _wait(lambda: target.exists() and target.read_bytes().count(b"\n") == 6)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in errors
    if number == signal.SIGINT:
        assert "6 finished requests are kept" in errors
        assert "--resume" in errors
    before = target.read_bytes()
    assert texts(read_records(target)) == {f"r{i}": expected[f"r{i}"] for i in range(6)}
    assert run("generate", config, "-i", source, "-o", target, "--resume").code == 0
    assert target.read_bytes().startswith(before)
    assert texts(read_records(target)) == expected


@pytest.mark.skipif(sys.platform == "win32", reason="files cannot be locked for others there")
@pytest.mark.parametrize("left", [(), ({"id": "r9", "line": 10, "error": "bad"},), ({"id": "r9", "outputs": []},)])
def test_two_runs_cannot_write_to_one_file(site: Site, run: Run, left: tuple[Any, ...]) -> None:
    source, expected = _ten(site)
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    target = site.folder / "out.jsonl"
    if left:
        site.write("out.jsonl", *left)
    config = site.config(generate=_GREEDY)
    arguments = ("-o", target, *(["--resume"] if left else []))
    with site.start("generate", config, "-i", "-", *arguments) as process:
        assert process.stdin is not None
        process.stdin.write("".join(lines[:3]))
        process.stdin.flush()
        _wait(lambda: target.exists() and b'"r2"' in target.read_bytes())
        before = target.read_bytes()
        second = run("generate", config, "-i", source, "-o", target, "--resume")
        assert second.code == 2
        assert "another run is writing" in second.err
        assert target.read_bytes() == before
        process.stdin.close()
        assert process.wait() == 0
    assert run("generate", config, "-i", source, "-o", target, "--resume").code == 0
    ids = [record["id"] for record in read_records(target)]
    assert sorted(ids) == sorted(expected)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("-i", "in.jsonl", "-o", "/dev/full"), ("--prompt", "a"), ("-i", "in.jsonl")])
def test_a_full_disk_is_reported_without_a_traceback(site: Site, arguments: tuple[str, ...]) -> None:
    site.write("in.jsonl", {"prompt": "Hello"})
    given = [site.folder / one if one == "in.jsonl" else one for one in arguments]
    with Path("/dev/full").open("wb") as full, site.start("generate", site.config(), *given, stdout=full) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "No space left on device" in errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


# ---------------------------------------------------------------- pipes


def test_another_program_can_wait_for_each_answer(site: Site) -> None:
    with site.start("generate", site.config(generate=_GREEDY), "--input", "-") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for prompt in ("one", "two", "three"):
            process.stdin.write(json.dumps({"id": prompt, "prompt": prompt}) + "\n")
            process.stdin.flush()
            record = json.loads(process.stdout.readline())
            assert record["id"] == prompt
            assert record["outputs"][0]["text"] == continuation(prompt, 8)
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait() == 0


def test_a_reader_that_goes_away_ends_the_run_quietly(site: Site) -> None:
    source = site.write("in.jsonl", *[{"prompt": "Hello"}] * 2000)
    reading, writing = os.pipe()
    with site.start("generate", site.config(generate=_GREEDY), "--input", source, stdout=writing) as process:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        _, errors = process.communicate()
    assert process.returncode == 141
    assert "Traceback" not in errors
    assert "error" not in errors
