"""A few rows times a matrix in oneDNN's blocked layout, in compiled C.

The library's product of one or two rows reads weights at little more than half the speed of memory; the kernel here
reads the very same packed bytes as fast as they come, and needs no second copy of them. Which layout the library chose
is checked by comparing a product, once per shape.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch

from trivet_kernels.cpu.build import library

if TYPE_CHECKING:
    from torch import Tensor

_P, _I = ctypes.c_void_p, ctypes.c_int64
_PANEL = 64
#: rows up to which the kernel is faster than the library, or as fast
MAX_ROWS = 64
#: what two orders of adding up may differ by, as a share of the largest result: a few steps of bfloat16
_TOLERANCE = 2.0**-6
_SEED = 20_261_130


class PackedRows:
    """The product with one packed matrix, whose memory it reads."""

    def __init__(self, packed: Tensor, shape: tuple[int, int], padded: int) -> None:
        """``packed`` is the opaque tensor of ``[out, in] = shape``; its panels have ``padded`` inputs."""
        found = library()
        assert found is not None, "shown by packed_rows"
        self._product = found.trivet_packed_bf16
        self._product.restype, self._product.argtypes = None, (_P, _I, _P, _P, _P, *[_I] * 6)
        self._packed = packed  # keeps the memory
        self._weight: int = torch.ops.mkldnn.data_ptr(packed)
        self._outputs, self._inputs = shape
        self._padded = padded

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x`` ``[T, in]`` bfloat16 with ``1 <= T <= 64`` and dense rows, ``bias`` ``[out]`` bfloat16; returns
        ``[T, out]``."""
        rows = x.shape[0]
        out = torch.empty(rows, self._outputs, dtype=torch.bfloat16)
        self._product(
            x.data_ptr(),
            x.stride(0),
            self._weight,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            self._outputs,
            rows,
            self._inputs,
            self._padded,
            self._outputs,
            torch.get_num_threads(),
        )
        return out


def packed_rows(packed: Tensor, shape: tuple[int, int]) -> PackedRows | None:
    """The kernel for a bfloat16 matrix that ``mkldnn._reorder_linear_weight`` packed; None where this processor, this
    layout or a missing compiler does not allow it."""
    found = library()
    if found is None or not found.trivet_has_packed_bf16() or shape[1] % 2:
        return None
    outputs = -(-shape[0] // _PANEL) * _PANEL
    padded, rest = divmod(torch.ops.mkldnn._nbytes(packed), 2 * outputs)
    if rest or padded < shape[1]:
        return None
    kernel = PackedRows(packed, shape, padded)
    return kernel if _layouts().agrees(kernel, packed, shape) else None


class _Layouts:
    """Which shapes the library packs as the kernel expects."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}

    def agrees(self, kernel: PackedRows, packed: Tensor, shape: tuple[int, int]) -> bool:
        """The verdict on a shape, from the first of its matrices that can show it; False for others before."""
        if shape not in self._known:
            x = torch.randn(2, shape[1], generator=torch.Generator().manual_seed(_SEED)).to(torch.bfloat16)
            expected = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "").float()
            if not _tells_outputs_apart(expected):
                return False
            atol = _TOLERANCE * float(expected.abs().max())
            self._known[shape] = torch.allclose(kernel(x, None).float(), expected, rtol=0.0, atol=atol)
        return self._known[shape]


def _tells_outputs_apart(products: Tensor) -> bool:
    """Whether another order of the outputs would show: they are finite, and most differ by more than the tolerance."""
    if not products.isfinite().all():
        return False
    spread = products.std(dim=1) if products.shape[1] > 1 else products[:, 0].abs()
    return bool((spread > 4 * _TOLERANCE * products.abs().max()).all())


@functools.cache
def _layouts() -> _Layouts:
    return _Layouts()
