"""Providers of these tests are imported by path, as those of a plugin outside the repository are."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
