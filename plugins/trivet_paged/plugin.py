"""Offers the cache provider ``paged``."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(_context: Context) -> Suitability:
    return Suitability(100, "blocks on demand waste at most one block per request")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="cache",
            name="paged",
            factory="trivet_paged.cache:PagedCache",
            options="trivet_paged.options:PagedOptions",
            suits=_suits,
            summary="KV memory in fixed-size blocks, allocated as requests grow",
        )
    ]
