"""The command lines of the scripts: what they take is explained, and what they cannot take is refused."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


def call(script: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [script, *options])
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_printed(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        call(script, "--help", monkeypatch=monkeypatch)
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["driver.py", "peer_engines.py", "perplexity.py", "kernels.py", "kernels.py bound"])
def test_every_argument_is_explained(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parsed(Exception):
        pass

    def stop(parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        raise Parsed(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed) as parsed:
        call(*command.split(), monkeypatch=monkeypatch)
    (parser,) = parsed.value.args
    assert [action.dest for action in parser._actions if not action.help] == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("driver.py {", "must be JSON"),
        ("driver.py 3", "must be a JSON object, got 3"),
        ("peer_engines.py sglang {}", "invalid choice: 'sglang'"),
        ("perplexity.py demo --repeat 0", "--repeat must be at least 1, got 0"),
        ("perplexity.py demo --tokens 1", "--tokens must be at least 2, got 1"),
        ("perplexity.py demo --output-len -1", "--output-len must be at least 0, got -1"),
        ("perplexity.py demo --window 1", "--window must be at least 2, got 1"),
        ("kernels.py --threads 0", "--threads: must be a number of at least 1, got '0'"),
        ("kernels.py bound model --token-budget -5", "--token-budget: must be a number of at least 1, got '-5'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        call(*command.split(), monkeypatch=monkeypatch)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
