"""The plugin's tests use the worker's runner behind plans written by hand, and models of their own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "trivet_torch"))
sys.path.insert(0, str(Path(__file__).parent))
