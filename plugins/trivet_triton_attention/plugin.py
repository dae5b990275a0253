"""Offers the attention provider ``triton``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from trivet.context import Context
from trivet.devices import device_kind
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability


def _suits(context: Context) -> Suitability:
    kind = device_kind(context.config.device)
    if kind != "cuda":
        return Suitability(None, f"its kernels are for CUDA and ROCm devices, and the device is {kind}")
    if importlib.util.find_spec("triton") is None:
        return Suitability(None, "Triton is not installed; the extra trivet[triton] brings it")
    return Suitability(60, "kernels for CUDA and ROCm devices")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="attention",
            name="triton",
            factory="trivet_triton_attention.attention:TritonAttention",
            options="trivet_triton_attention.options:TritonAttentionOptions",
            suits=_suits,
            requires={"triton": "triton"},
            summary="paged attention in Triton, on CUDA and ROCm",
        )
    ]
