"""Plugin ``quantization``: weights of few bits."""

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
            role="quantization",
            name="int8",
            factory="trivet_quantization.int8:Int8",
            suits=_suits,
            summary="Weights of eight bits.",
        )
    ]
