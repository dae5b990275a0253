"""Settings of ``trivet bench memory`` that cannot work are refused before any time is spent."""

from __future__ import annotations

from typing import Any

import pytest
from launcher_kit import Run

import trivet.bench.memory as memory


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No study may begin."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a measurement was begun")

    monkeypatch.setattr(memory, "measure", refuse)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--block-size", 10**6), "less than one block of 1000000 tokens"),
        (("--block-size", 10**18), "less than one block"),
        (("--block-size", 7, "--kv-tokens", 2048, "--max-model-len", 2048), "at most 2044 fit"),
        (("--kv-tokens", 100), "at most 64 fit"),
        (("--kv-tokens", 10**18), "--kv-tokens"),
        (("--max-model-len", 10**12), "--max-model-len"),
        (("--num-requests", 10**15), "--num-requests"),
        (("--json", "/proc/nothing-of-this-name"), "--json"),
        (("--plot", "/proc/nothing-of-this-name.png"), "--plot"),
    ],
)
def test_it_is_refused_at_once(run: Run, arguments: tuple[Any, ...], named: str) -> None:
    result = run("bench", "memory", *arguments)
    assert result.code == 2
    assert named in result.err
    assert "a measurement was begun" not in result.err
    assert result.out == ""
