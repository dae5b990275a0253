"""Makes the helpers beside the tests importable, and those of the core's tests and the rehearsal."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "core"), str(HERE.parents[1] / "rehearsal")]
