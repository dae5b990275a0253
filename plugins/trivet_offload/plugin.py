"""Offers the cache tier ``offload`` and its policies ``lru`` and ``arc``."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.hookspecs import hookimpl
from trivet.provider import Component, Provider


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="cache_tier",
            name="offload",
            factory="trivet_offload.tier:OffloadTier",
            options="trivet_offload.options:OffloadOptions",
            worker_factory="trivet_offload.worker:OffloadWorker",
            summary="evicted KV blocks go to host memory and to disk, and come back when a prefix is seen again",
        )
    ]


@hookimpl
def trivet_components() -> Sequence[Component]:
    """The policies' descriptors."""
    return [
        Component("tier_policy", "lru", "trivet_offload.policies:LruPolicy", summary="the least recently used goes"),
        Component(
            "tier_policy",
            "arc",
            "trivet_offload.policies:ArcPolicy",
            summary="adapts between recency and frequency, so that a scan does not flush what is used often",
        ),
    ]
