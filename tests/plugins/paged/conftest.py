"""The plugin's tests run engines on the fakes, as the core's do."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(_TESTS / "core"), str(_TESTS / "rehearsal")]
