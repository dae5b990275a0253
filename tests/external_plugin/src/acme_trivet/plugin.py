"""Entry point ``acme_shortest``: offers the scheduler, and imports nothing that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.hookspecs import hookimpl
from trivet.provider import Provider


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The scheduler's descriptor."""
    return [
        Provider(
            role="scheduler",
            name="acme_shortest",
            factory="acme_trivet.scheduler:ShortestFirst",
            options="acme_trivet.scheduler:ShortestOptions",
            summary="the shortest prompt first, and nobody later than after some steps",
        )
    ]
