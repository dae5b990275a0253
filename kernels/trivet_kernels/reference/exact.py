"""Functions whose every bit is defined, so that kernels in other languages can have the very same results.

They consist of single IEEE operations in a fixed order; nothing is fused and nothing is left to a library.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: bits of sqrt(1/2) in float64: what lies below it has one exponent less
_ROOT = 0x3FE6A09E667F3BCD
_LOG2 = 0.6931471805599453
#: weights are integers of this many to one: 2**19 of them fit into 63 bits
ONE = 2.0**42
#: distances from which on weights are 0
FAR = -30.0
_INV_LOG2, _MAGIC = 1.44269504, 12582912.0  # what 1.5 * 2**23 is added to is rounded to an integer
_LOG2_HIGH, _LOG2_LOW = 0.693145751953125, 1.42860682e-6
_EXP = (1.3926250394e-3, 8.3632329479e-3, 4.1666552424e-2, 1.6666576266e-1, 0.5)


def log(values: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 numbers, within 3 units in the last place.

    ``x = 2**e * m`` with ``m`` around 1, and ``log m = 2 atanh s`` by its series, ``s = (m - 1) / (m + 1)``.
    """
    bits = values.view(torch.int64)
    exponent = (bits - _ROOT) >> 52
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = torch.full_like(z, 1 / 21)
    for degree in range(19, 1, -2):
        series = series * z + 1 / degree
    double = s + s
    return exponent.double() * _LOG2 + (double + double * (series * z))


def weights(distance: Tensor) -> Tensor:
    """``exp`` of float32 numbers up to 0, as int64 multiples of ``1 / ONE``: sums do not depend on their order.

    Relative error 1e-7, and half a unit. The exponential is 2**n times a polynomial of what is left, whose coefficients
    interpolate it in Chebyshev points.
    """
    x = distance.clamp(min=FAR)
    shifted = x * _INV_LOG2 + _MAGIC
    whole = shifted - _MAGIC
    r = x - whole * _LOG2_HIGH
    r = r - whole * _LOG2_LOW
    p = r * _EXP[0] + _EXP[1]
    for coefficient in _EXP[2:]:
        p = p * r + coefficient
    p = p * (r * r) + r + 1.0
    power = ((whole.int() + 127) << 23).view(torch.float32)
    return ((p * power).double() * ONE).round().long()
