"""The plugin's tests use the worker's: tiny models, and a runner behind plans written by hand."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "trivet_torch"))
