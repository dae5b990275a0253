"""Plugin ``inline``: the worker in the process of the engine."""

from __future__ import annotations

from trivet.hookspecs import hookimpl
from trivet.provider import Provider


@hookimpl
def trivet_providers() -> list[Provider]:
    """Offer the executor."""
    return [
        Provider(
            role="executor",
            name="inline",
            factory="trivet_inline.executor:InlineExecutor",
            options="trivet_inline.options:InlineOptions",
            summary="One worker in the engine's own process, on its thread or beside it.",
        )
    ]
