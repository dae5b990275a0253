"""Offers the attention provider ``triton``."""

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
            name="triton",
            factory="trivet_triton_attention.attention:TritonAttention",
            suits=_suits,
            summary="paged attention in Triton, on CUDA and ROCm",
        )
    ]
