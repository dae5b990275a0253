"""Run kernels in Triton's interpreter where there is no GPU, and share a module and the models of the native tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

for folder in ("plugins/quantization", "plugins/native", "trivet_torch"):
    sys.path.insert(0, str(Path(__file__).parents[2] / folder))
# Read when kernels are defined, so before anything imports them.
os.environ.setdefault("TRITON_INTERPRET", "1")
