"""Offers the cache provider ``contiguous``."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(_context: Context) -> Suitability:
    return Suitability(10, "a baseline: reserves each request's memory ahead")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="cache",
            name="contiguous",
            factory="trivet_contiguous.cache:ContiguousCache",
            options="trivet_contiguous.options:ContiguousOptions",
            suits=_suits,
            summary="one contiguous run of memory per request, reserved ahead (baseline)",
        )
    ]
