"""Makes the helpers beside the tests importable, and the fakes of the rehearsal."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rehearsal")]
