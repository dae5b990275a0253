"""Models and references, made once per session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import kit
import pytest
import sharing


class Library:
    """Makes each family's model and reference at the first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        self._made: dict[str, Any] = {}
        self._rounds: dict[str, tuple[sharing.Round, sharing.Round]] = {}

    def path(self, family: str) -> Path:
        """Folder of the model."""
        if family not in self._paths:
            self._paths[family] = kit.make_model(family, self._folder)
        return self._paths[family]

    def get(self, family: str) -> Any:
        """Folder of the model, work, reference tokens, gaps."""
        if family not in self._made:
            path = self.path(family)
            work = kit.make_work(200, seed=len(family))
            self._made[family] = (path, work, *kit.reference(path, work))
        return self._made[family]

    def rounds(self, family: str) -> tuple[sharing.Round, sharing.Round]:
        """Groups of prompts that begin alike, and the next turns of half of them."""
        if family not in self._rounds:
            path = self.path(family)
            work = sharing.make_groups(seed=len(family))
            groups = sharing.Round(work, *kit.reference(path, work))
            later = sharing.make_turns(work, groups.want, seed=len(family))
            self._rounds[family] = (groups, sharing.Round(later, *kit.reference(path, later)))
        return self._rounds[family]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Models with their references."""
    return Library(tmp_path_factory.mktemp("models"))
