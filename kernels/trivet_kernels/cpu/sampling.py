"""What is looked for in logits on a CPU, in compiled C."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from trivet_kernels.cpu.types import DTYPES
from trivet_kernels.reference import sampling as reference

if TYPE_CHECKING:
    from torch import Tensor

_P, _I = ctypes.c_void_p, ctypes.c_int64


class NativeSampling:
    """Float32 and bfloat16 logits on the CPU whose rows are dense; others are left to
    :mod:`trivet_kernels.reference.sampling`.

    Args:
        library: As :func:`trivet_kernels.cpu.build.library` returns it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._argmax = library.trivet_argmax
        self._argmax.restype, self._argmax.argtypes = None, (_P, _P, _P, *[_I] * 5)

    def argmax(self, logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """:func:`trivet_kernels.reference.sampling.argmax`, whose results these are."""
        rows, width = logits.shape
        if not 0 < size <= width:
            raise ValueError(f"size must be in [1, {width}] for logits {list(logits.shape)}, not {size}")
        code = DTYPES.get(logits.dtype)
        if code is None or logits.stride(1) != 1 or not logits.is_cpu:
            return reference.argmax(logits, size)
        ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=logits.dtype)
        threads = 1 if rows == 1 else torch.get_num_threads()
        self._argmax(logits.data_ptr(), ids.data_ptr(), values.data_ptr(), rows, size, logits.stride(0), code, threads)
        return ids, values

    def serves(self, logits: Tensor) -> bool:
        return False
