"""Offers the quantization providers ``int8``, ``int4`` and ``gguf``."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.hookspecs import hookimpl
from trivet.provider import Provider


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The providers' descriptors."""
    return [
        Provider(
            role="quantization",
            name="int8",
            factory="trivet_quantization.int8:Int8",
            options="trivet_quantization.options:Int8Options",
            summary="weights of eight bits, products of integers",
        ),
        Provider(
            role="quantization",
            name="int4",
            factory="trivet_quantization.int4:Int4",
            options="trivet_quantization.options:Int4Options",
            summary="weights of four bits, and of eight where four cost too much accuracy",
        ),
        Provider(
            role="quantization",
            name="gguf",
            factory="trivet_quantization.gguf:Gguf",
            options="trivet_quantization.options:GgufOptions",
            summary="the blocks of a GGUF file as they are, or in more bits",
        ),
    ]
