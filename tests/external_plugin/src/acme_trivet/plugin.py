"""Entry point ``acme_shortest``: offers a scheduler and a logits processor, and imports nothing that they need."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.hookspecs import hookimpl
from trivet.provider import Provider


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """Their descriptors."""
    return [
        Provider(
            role="scheduler",
            name="acme_shortest",
            factory="acme_trivet.scheduler:ShortestFirst",
            options="acme_trivet.scheduler:ShortestOptions",
            summary="the shortest prompt first, and nobody later than after some steps",
        ),
        Provider(
            role="logits_processor",
            name="acme_no_echo",
            factory="acme_trivet.no_echo:NoEcho",
            options="acme_trivet.no_echo:NoEchoOptions",
            summary="makes the token before less likely",
        ),
    ]
