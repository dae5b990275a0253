"""``python -m trivet.launcher``, the same as ``trivet``."""

from __future__ import annotations

import sys

from trivet.launcher import main

if __name__ == "__main__":
    sys.exit(main())
