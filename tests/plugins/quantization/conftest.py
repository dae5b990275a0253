"""Run kernels in Triton's interpreter where there is no GPU, and let the tests of this folder share a module."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Read when kernels are defined, so before anything imports them.
os.environ.setdefault("TRITON_INTERPRET", "1")
