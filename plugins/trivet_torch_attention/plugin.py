"""Offers the attention provider ``torch``."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(_context: Context) -> Suitability:
    return Suitability(10, "plain PyTorch, runs on any device; for want of a native kernel")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="attention",
            name="torch",
            factory="trivet_torch_attention.attention:TorchAttention",
            suits=_suits,
            summary="paged attention in plain PyTorch operations, on any device",
        )
    ]
