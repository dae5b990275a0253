"""Offers the scheduler ``continuous`` and the policies that it comes with."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Component, Provider, Suitability

_SCHEDULING = {
    "fcfs": ("policies:Fcfs", "first come, first served"),
    "priority": ("policies:Priority", "the least priority first, if wanted in place of running requests"),
    "shortest_first": ("policies:ShortestFirst", "short requests first, with ageing"),
    "fair_share": ("fair_share:FairShare", "the user who was served least (virtual token counters)"),
    "deadline": ("policies:Deadline", "the earliest deadline first"),
}
_VICTIMS = {
    "newest": ("victims:Newest", "the request admitted last"),
    "least_priority": ("victims:LeastPriority", "the least urgent request"),
    "least_computed": ("victims:LeastComputed", "the request that is cheapest to redo"),
    "most_blocks": ("victims:MostBlocks", "the request with the most blocks"),
}


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
        Component(kind, name, f"trivet_continuous.{path}", summary=summary)
        for kind, parts in (("scheduling_policy", _SCHEDULING), ("victim_policy", _VICTIMS))
        for name, (path, summary) in parts.items()
    ]
