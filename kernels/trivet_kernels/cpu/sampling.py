"""Sampling on a CPU, in compiled C."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from trivet_kernels.cpu.types import DTYPES
from trivet_kernels.reference import sampling as reference

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from trivet_kernels.sampling import DrawParams

_P, _I = ctypes.c_void_p, ctypes.c_int64
#: ids are 31 bits of a rank, and sums of weights 63 bits
_MAX_SIZE = 1 << 19
#: parameters and outcome of a row, as sampling_draw.c has them
_DRAW = np.dtype(
    [
        *((name, np.int64) for name in ("x", "dtype", "top_k", "position")),
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("log_min_p", np.float64),
        ("temperature", np.float32),
        ("id", np.int32),
        ("highest", np.float32),
        ("unused", np.float32),
    ]
)
#: a row whose logprobs are wanted, as sampling_logprobs.c has it
_LOGPROB = np.dtype(
    [("x", np.int64), ("dtype", np.int64), ("token", np.int64), ("logprob", np.float32), ("rank", np.int32)]
)


class NativeSampling:
    """Float32 and bfloat16 logits on the CPU whose rows are dense; others are left to
    :mod:`trivet_kernels.reference.sampling`.

    Args:
        library: As :func:`trivet_kernels.cpu.build.library` returns it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._argmax = library.trivet_argmax
        self._argmax.restype, self._argmax.argtypes = None, (_P, _P, _P, *[_I] * 5)
        self._likeliest = library.trivet_likeliest
        self._likeliest.restype, self._likeliest.argtypes = _I, (_P, _P, *[_I] * 5)
        self._draw = library.trivet_draw
        self._draw.restype, self._draw.argtypes = _I, (_P, _I, _I, _I)
        self._logprobs = library.trivet_logprobs
        self._logprobs.restype, self._logprobs.argtypes = _I, (_P, _P, _P, *[_I] * 5)
        self._float_rows = library.trivet_float_rows
        self._float_rows.restype, self._float_rows.argtypes = None, (*[_P] * 4, *[_I] * 7)

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
        """Whether the methods below take these logits."""
        return logits.is_cpu and logits.dtype in DTYPES and logits.stride(1) == 1 and 0 < logits.shape[1] < _MAX_SIZE

    def likeliest(self, logits: Tensor, size: int) -> NDArray[np.int32] | None:
        """:func:`trivet_kernels.sampling.likeliest`."""
        rows = logits.shape[0]
        ids = torch.empty(rows, dtype=torch.int32)  # whose address costs less than an array's
        code, threads = DTYPES[logits.dtype], self._threads(rows)
        lost = self._likeliest(logits.data_ptr(), ids.data_ptr(), rows, size, logits.stride(0), code, threads)
        return None if lost else ids.numpy()

    def draw(
        self, logits: Tensor, changed: Tensor | None, source: NDArray[np.int64], size: int, params: DrawParams
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """:func:`trivet_kernels.sampling.draw`: the tokens are those of :mod:`trivet_kernels.reference.sampling`."""
        table = np.zeros(len(source), _DRAW)
        for part, rows, places in ((logits, source, source >= 0), (changed, ~source, source < 0)):
            if part is not None:
                table["dtype"][places] = DTYPES[part.dtype]
                table["x"][places] = part.data_ptr() + rows[places] * (part.stride(0) * part.element_size())
        for name in ("top_k", "top_p", "temperature"):
            table[name] = getattr(params, name)
        table["position"], table["seed"] = params.positions, params.seeds.view(np.uint64)
        # The logarithm is torch's here as there.
        table["log_min_p"] = torch.from_numpy(params.min_p).log().numpy()
        if self._draw(table.ctypes.data, len(table), size, self._threads(len(table))):
            raise MemoryError(f"no memory to draw from {size} logits")
        return table["id"].copy(), table["highest"].copy()

    def logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], count: int, size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
        """:func:`trivet_kernels.sampling.logprobs`."""
        table = np.zeros(len(rows), _LOGPROB)
        table["x"] = logits.data_ptr() + rows * (logits.stride(0) * logits.element_size())
        table["dtype"], table["token"] = DTYPES[logits.dtype], tokens
        ids, values = np.empty((len(rows), count), np.int32), np.empty((len(rows), count), np.float32)
        if self._logprobs(
            table.ctypes.data,
            ids.ctypes.data,
            values.ctypes.data,
            len(rows),
            size,
            logits.shape[1],
            count,
            self._threads(len(rows)),
        ):
            raise MemoryError(f"no memory to rank {size} logits")
        return (
            np.concatenate([tokens[:, None].astype(np.int32), ids], 1),
            np.concatenate([table["logprob"][:, None], values], 1),
            table["rank"].copy(),
        )

    def float_rows(self, logits: Tensor, rows: NDArray[np.int64], bitmask: Tensor | None, out: Tensor) -> None:
        """Write float32 copies of some rows to the first rows of ``out``, see
        :func:`trivet_kernels.sampling.float_rows`."""
        bits = None if bitmask is None else bitmask.contiguous()
        self._float_rows(
            logits.data_ptr(),
            out.data_ptr(),
            np.ascontiguousarray(rows).ctypes.data,
            None if bits is None else bits.data_ptr(),
            len(rows),
            logits.shape[1],
            logits.stride(0),
            out.stride(0),
            0 if bits is None else bits.shape[1],
            DTYPES[logits.dtype],
            self._threads(len(rows)),
        )

    @staticmethod
    def _threads(rows: int) -> int:
        return 1 if rows == 1 else torch.get_num_threads()
