"""Offers the scheduler ``continuous``, its queue policy ``fcfs`` and its victim policy ``newest``."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Component, Provider, Suitability


def _suits(_context: Context) -> Suitability:
    return Suitability(100, "admits and ends requests at every step")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="scheduler",
            name="continuous",
            factory="trivet_continuous.scheduler:ContinuousScheduler",
            options="trivet_continuous.options:ContinuousOptions",
            suits=_suits,
            summary="continuous batching with a token budget, chunked prefill and preemption",
        )
    ]


@hookimpl
def trivet_components() -> Sequence[Component]:
    """The policies' descriptors."""
    return [
        Component("scheduling_policy", "fcfs", "trivet_continuous.policies:fcfs", summary="first come, first served"),
        Component("victim_policy", "newest", "trivet_continuous.policies:newest", summary="the request admitted last"),
    ]
