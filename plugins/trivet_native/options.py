"""Options of the ``native`` model."""

from __future__ import annotations

from trivet_schemas.options import Options


class NativeOptions(Options):
    """How the model is computed."""

    compile: bool = False
    """Compile what lies between attention calls with torch.compile, instead of using the native operations and packed
    weights. The first steps then take long."""
