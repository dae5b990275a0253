"""Options of the ``triton`` attention."""

from __future__ import annotations

from trivet_schemas.options import Options


class TritonAttentionOptions(Options):
    """Paged attention in Triton."""

    autotune: bool = False
    """Whether the kernels' tiles are measured on the device when the first layer of a shape runs, in place of taking
    those known to do well on such devices. It takes a minute, two at most, at the first start; what was found is kept
    in `~/.cache/trivet/tiles` (or below `XDG_CACHE_HOME`) for later ones. Off, since tiles decide in which order
    numbers are added up: the last bits of results could differ between machines of one kind."""
