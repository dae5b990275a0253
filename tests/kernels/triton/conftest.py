"""Let the tests of this folder share a module, and run kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Read when kernels are defined, so before anything imports them. Compilations run in a process without it.
os.environ.setdefault("TRITON_INTERPRET", "1")
