"""Plugin ``transformers``: decoder-only models of the transformers library."""

from __future__ import annotations

from trivet.hookspecs import hookimpl
from trivet.provider import Provider


@hookimpl
def trivet_providers() -> list[Provider]:
    """Offer the model."""
    return [
        Provider(
            role="model",
            name="transformers",
            factory="trivet_transformers.model:TransformersModel",
            capabilities={"tasks": ("generate", "embed")},
            requires={"torch": "trivet", "transformers": "trivet"},
            summary="Any decoder-only model of transformers, through its attention interface.",
        )
    ]
