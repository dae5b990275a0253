"""Offers the attention provider ``cpu``."""

from __future__ import annotations

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(_context: Context) -> Suitability:
    return Suitability(None, "not ready")


@hookimpl
def trivet_providers() -> list[Provider]:
    """Offer the provider."""
    return [
        Provider(
            role="attention",
            name="cpu",
            factory="trivet_cpu_attention.attention:CpuAttention",
            suits=_suits,
            summary="paged attention by native kernels, on CPUs",
        )
    ]
