"""Offers the attention provider ``cpu``."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from trivet.context import Context
from trivet.devices import device_kind
from trivet.hookspecs import hookimpl
from trivet.provider import Provider, Suitability

#: as in trivet_kernels.cpu.build, which is not imported before it is needed
_COMPILERS = ("gcc", "cc", "clang")


def _suits(context: Context) -> Suitability:
    kind = device_kind(context.config.device)
    if kind != "cpu":
        return Suitability(None, f"its kernel is for CPUs, and the device is {kind}")
    found = next((name for name in _COMPILERS if shutil.which(name)), None)
    if found is None:
        return Suitability(None, f"no C compiler ({', '.join(_COMPILERS)}) is on the PATH to compile its kernel")
    return Suitability(50, f"a kernel for this processor, compiled on first use by {found}")


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """The provider's descriptor."""
    return [
        Provider(
            role="attention",
            name="cpu",
            factory="trivet_cpu_attention.attention:CpuAttention",
            suits=_suits,
            summary="paged attention by a kernel in C, on CPUs",
        )
    ]
