"""Models and references, made once per session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import kit
import pytest


class Library:
    """Makes each family's model and reference at the first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Any] = {}

    def get(self, family: str) -> Any:
        """Folder of the model, work, reference tokens, gaps."""
        if family not in self._made:
            path = kit.make_model(family, self._folder)
            work = kit.make_work(200, seed=len(family))
            self._made[family] = (path, work, *kit.reference(path, work))
        return self._made[family]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Models with their references."""
    return Library(tmp_path_factory.mktemp("models"))
