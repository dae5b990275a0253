"""Run kernels in Triton's interpreter where there is no GPU, and share the tiny models of the native model's tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Read when kernels are defined, so before anything imports them.
os.environ.setdefault("TRITON_INTERPRET", "1")
for folder in ("trivet_torch", "plugins/native"):
    sys.path.insert(0, str(Path(__file__).parents[2] / folder))
