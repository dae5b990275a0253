"""Offers the sampler ``sampler``."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(_context: Context) -> Suitability:
    return Suitability(10, "runs on any device")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="sampler",
            name="sampler",
            factory="trivet_sampler.sampler:TorchSampler",
            suits=_suits,
            summary="every sampling parameter, reproducible seeds, logprobs, verification of drafts",
        )
    ]
