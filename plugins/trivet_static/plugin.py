"""Offers the scheduler ``static``."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(_context: Context) -> Suitability:
    return Suitability(10, "a baseline: a batch runs until its last request has ended")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="scheduler",
            name="static",
            factory="trivet_static.scheduler:StaticScheduler",
            options="trivet_static.options:StaticOptions",
            suits=_suits,
            summary="the classic batch: filled once, run until all of it has ended (baseline)",
        )
    ]
