"""Makes the fakes beside the tests importable."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rehearsal_kit import prompts


@pytest.fixture
def work() -> dict[str, tuple[list[int], int]]:
    """Twenty prompts of mixed lengths with the number of tokens to generate."""
    rng = random.Random(1)
    return {str(i): (prompt, rng.randint(1, 30)) for i, prompt in enumerate(prompts(20))}
