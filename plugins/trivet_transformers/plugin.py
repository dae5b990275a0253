"""Plugin ``transformers``: decoder-only models of the transformers library."""

from __future__ import annotations

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(_context: Context) -> Suitability:
    return Suitability(10, "serves every decoder-only model of transformers")


@hookimpl
def trivet_providers() -> list[Provider]:
    """Offer the model."""
    return [
        Provider(
            role="model",
            name="transformers",
            factory="trivet_transformers.model:TransformersModel",
            suits=_suits,
            capabilities={"tasks": ("generate", "embed")},
            requires={"torch": "", "transformers": ""},
            summary="Any decoder-only model of transformers, through its attention interface.",
        )
    ]
