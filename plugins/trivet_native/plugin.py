"""Plugin ``native``: common decoder families on a fast path."""

from __future__ import annotations

from trivet.context import Context
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(context: Context) -> Suitability:
    from trivet_native.suits import suits

    return suits(context.config)


@hookimpl
def trivet_providers() -> list[Provider]:
    """Offer the provider."""
    return [
        Provider(
            role="model",
            name="native",
            factory="trivet_native.model:NativeModel",
            options="trivet_native.options:NativeOptions",
            suits=_suits,
            capabilities={"tasks": ("generate", "embed", "classify", "score")},
            requires={"torch": "", "transformers": ""},
            summary="Common decoder families with fused and packed weights.",
        )
    ]
