"""Fixtures of the command line's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launcher_kit import Result, Run, Site

from trivet.launcher import main


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Return a site with the fake providers installed."""
    packages, folder = tmp_path / "site", tmp_path / "files"
    packages.mkdir()
    folder.mkdir()
    monkeypatch.syspath_prepend(packages)
    site = Site(packages, folder)
    site.install("acme-fakes", {"fakes": "trivet.testing.fakes"})
    yield site
    site.forget()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command in this process."""

    def run(*arguments: Any) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run
