"""Run kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

# Read when kernels are defined, so before anything imports them.
os.environ.setdefault("TRITON_INTERPRET", "1")
