"""What the kernels need to know of the device and of Triton: architectures, the interpreter, 8-bit floats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

#: Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when they were defined), with numpy in place of a
#: device. Its products of bfloat16 matrices are wrong, so kernels compute in float32 there.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)


def jit(*, unspecialized: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a kernel or a part of kernels.

    ``unspecialized`` names integers that change from step to step: no variant is compiled for those that are 1 or
    multiples of 16, which would stop a step for the compiler.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(unspecialized))

    return decorate


def runs_here(device: torch.device) -> bool:
    """Whether the kernels of this process run on tensors of a device: a GPU, or any if they are interpreted."""
    return device.type == "cuda" or bool(INTERPRETED.value)


@functools.cache
def architecture(device: torch.device) -> str:
    """``sm_90``, ``gfx942``, …, or ``interpreter``."""
    if INTERPRETED.value:
        return "interpreter"
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def converts_e4m3(arch: str) -> bool:
    """Whether an architecture has instructions that widen ``float8_e4m3fn``, as NVIDIA's have from 8.9 on."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 89


@jit()
def tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent, by an exponential that cannot overflow."""
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@jit()
def widen(stored: tl.tensor, dtype: tl.constexpr, kind: tl.constexpr, native: tl.constexpr) -> tl.tensor:
    """What a cache holds, in ``dtype``. 8-bit floats (``kind`` ``e4m3`` or ``e5m2``) are given as bytes.

    Without an instruction for it, a byte's exponent and mantissa are put into those of a float16. ``e5m2`` is the upper
    half of one; in ``e4m3`` the exponent's bias is 8 less, which a factor of 256 makes up for, subnormal numbers
    included.
    """
    if kind == "e5m2":
        wide = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif kind == "e4m3":
        if native:
            wide = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            bits = stored.to(tl.uint16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            wide = tl.where((bits & 0x7F) == 0x7F, float("nan"), half * 256.0)
    else:
        wide = stored
    return wide.to(dtype)


@jit()
def narrow(x: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Float32 numbers as bytes of ``e4m3`` or ``e5m2``: rounded to the nearest, ties to even, what is too large to the
    largest, NaN stays NaN. The same on every device, since few have an instruction that does just that."""
    most: tl.constexpr = 448.0 if kind == "e4m3" else 57344.0
    # Bits of float32's mantissa to round away, what exponents' biases differ by, and the smallest normal number with
    # the number whose last place is as large as a subnormal step.
    cut: tl.constexpr = 20 if kind == "e4m3" else 21
    bias: tl.constexpr = 120 << 3 if kind == "e4m3" else 112 << 2
    normal: tl.constexpr = 0.015625 if kind == "e4m3" else 0.00006103515625
    magic: tl.constexpr = 16384.0 if kind == "e4m3" else 128.0
    size = tl.minimum(tl.abs(x), most)
    bits = size.to(tl.uint32, bitcast=True)
    rounded = ((bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut) - bias
    step = (size + magic).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(size < normal, step, rounded)
    bits = x.to(tl.uint32, bitcast=True)
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
