"""The operations between matrix products, in compiled C.

They run on one thread unless there is work for more: waking the others costs as much as normalising dozens of rows.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from trivet_kernels.cpu.types import DTYPES
from trivet_kernels.ops import Ops
from trivet_kernels.reference.ops import ReferenceOps

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT32 = torch.float32
_SILU, _GELU_TANH, _GELU_ERF = range(3)
_LARGEST_HEAD = 1024
#: elements of a call from which on it takes several threads
_MANY, _MANY_GATED, _MANY_ROTATED = 1 << 16, 1 << 15, 1 << 16

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "trivet_rms_norm": (None, (*[_P] * 3, *[_I] * 7, _F, *[_I] * 2)),
    "trivet_add_rms_norm": (None, (*[_P] * 4, *[_I] * 5, _F, *[_I] * 2)),
    "trivet_gate_and_mul": (None, (*[_P] * 2, *[_I] * 7)),
    "trivet_rotary": (_I, (*[_P] * 6, *[_I] * 11, _F, *[_I] * 3)),
}


class NativeOps(Ops):
    """Float32 and bfloat16 tensors on the CPU whose last dimension is dense; anything else is left to
    :class:`~trivet_kernels.reference.ops.ReferenceOps`.

    A row's result depends on nothing but the row: not on how many there are, nor on the number of threads.

    Args:
        library: As :func:`trivet_kernels.cpu.build.library` returns it.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.library = library
        self._rms_norm = library.trivet_rms_norm
        self._add_rms_norm = library.trivet_add_rms_norm
        self._gate = library.trivet_gate_and_mul
        self._rotary = library.trivet_rotary
        self._others = ReferenceOps()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        shape, dtype = x.shape, x.dtype
        size = shape[-1]
        if weight.shape != (size,):
            raise ValueError(f"weight must be [{size}] for rows of {size}, not {list(weight.shape)}")
        if out is None:
            out = torch.empty_like(x)
        elif out.shape != shape:
            raise ValueError(f"out must be {list(shape)} like x, not {list(out.shape)}")
        strides, out_strides = x.stride(), out.stride()
        if (
            2 <= len(shape) <= 3
            and strides[-1] == out_strides[-1] == 1
            and dtype is out.dtype
            and (code := DTYPES.get(dtype)) is not None
            and weight.dtype is _FLOAT32
            and weight.is_contiguous()
            and x.is_cpu
        ):
            inner = shape[1] if len(shape) == 3 else 1
            count = shape[0] * inner
            self._rms_norm(
                x.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                shape[0],
                inner,
                size,
                strides[0],
                strides[1],
                out_strides[0],
                out_strides[1],
                eps,
                code,
                1 if count * size < _MANY else torch.get_num_threads(),
            )
            return out
        return self._others.rms_norm(x, weight, eps, out)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        shape, dtype = x.shape, x.dtype
        rows, size = shape
        if weight.shape != (size,):
            raise ValueError(f"weight must be [{size}] for rows of {size}, not {list(weight.shape)}")
        if residual.shape != shape:
            raise ValueError(f"residual must be {list(shape)} like x, not {list(residual.shape)}")
        if out is None:
            out = torch.empty_like(residual)
        elif out.shape != shape:
            raise ValueError(f"out must be {list(shape)} like x, not {list(out.shape)}")
        stride, dense = x.stride()
        residual_stride, residual_dense = residual.stride()
        out_stride, out_dense = out.stride()
        if (
            dense == residual_dense == out_dense == 1
            and dtype is residual.dtype
            and dtype is out.dtype
            and (code := DTYPES.get(dtype)) is not None
            and weight.dtype is _FLOAT32
            and weight.is_contiguous()
            and x.is_cpu
        ):
            self._add_rms_norm(
                x.data_ptr(),
                residual.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                rows,
                size,
                stride,
                residual_stride,
                out_stride,
                eps,
                code,
                1 if rows * size < _MANY else torch.get_num_threads(),
            )
            return out
        return self._others.add_rms_norm(x, residual, weight, eps, out)

    def rotary(
        self,
        query: Tensor,
        key: Tensor,
        positions: Tensor,
        table: Tensor,
        *,
        interleaved: bool = False,
        query_weight: Tensor | None = None,
        key_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        tokens, heads, dim = query.shape
        key_tokens, key_heads, key_dim = key.shape
        num_positions, width = table.shape
        if key_tokens != tokens or key_dim != dim or positions.shape != (tokens,):
            raise ValueError(
                f"query {list(query.shape)}, key {list(key.shape)} and positions {list(positions.shape)} must agree in "
                "tokens and head size"
            )
        if width % 2 or width > dim:
            raise ValueError(f"table must have an even number of columns, at most {dim}, not {width}")
        strides, key_strides, table_strides = query.stride(), key.stride(), table.stride()
        code = DTYPES.get(query.dtype)
        if (
            code is None
            or key.dtype is not query.dtype
            or strides[2] != 1
            or key_strides[2] != 1
            or table_strides[1] != 1
            or table.dtype is not _FLOAT32
            or positions.dtype is not torch.int64
            or not positions.is_contiguous()
            or dim > _LARGEST_HEAD
            or not query.is_cpu
            or not (query_weight is None or _is_norm(query_weight, dim))
            or not (key_weight is None or _is_norm(key_weight, dim))
        ):
            self._others.rotary(
                query,
                key,
                positions,
                table,
                interleaved=interleaved,
                query_weight=query_weight,
                key_weight=key_weight,
                eps=eps,
            )
            return
        wrong = self._rotary(
            query.data_ptr(),
            key.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            None if query_weight is None else query_weight.data_ptr(),
            None if key_weight is None else key_weight.data_ptr(),
            tokens,
            heads,
            key_heads,
            dim,
            width,
            strides[0],
            strides[1],
            key_strides[0],
            key_strides[1],
            table_strides[0],
            num_positions,
            eps,
            interleaved,
            code,
            1 if tokens * (heads + key_heads) * dim < _MANY_ROTATED else torch.get_num_threads(),
        )
        if wrong:
            raise IndexError(
                f"positions must be in [0, {num_positions}), the rows of the table, not "
                f"{int(positions.min())} to {int(positions.max())}"
            )

    def silu_and_mul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        done = self._gated(x, out, _SILU)
        return self._others.silu_and_mul(x, out) if done is None else done

    def gelu_and_mul(self, x: Tensor, out: Tensor | None = None, *, approximate: bool = True) -> Tensor:
        done = self._gated(x, out, _GELU_TANH if approximate else _GELU_ERF)
        return self._others.gelu_and_mul(x, out, approximate=approximate) if done is None else done

    def _gated(self, x: Tensor, out: Tensor | None, kind: int) -> Tensor | None:
        """The result, or None if it is not for the C function."""
        rows, width = x.shape
        size, dtype = width // 2, x.dtype
        if width % 2:
            raise ValueError(f"x must have an even number of columns, not {width}")
        if out is None:
            out = torch.empty((rows, size), dtype=dtype, device=x.device)
        elif out.shape != (rows, size):
            raise ValueError(f"out must be {[rows, size]}, half of x, not {list(out.shape)}")
        stride, dense = x.stride()
        out_stride, out_dense = out.stride()
        code = DTYPES.get(dtype)
        if code is None or dense != 1 or out_dense != 1 or out.dtype is not dtype or not x.is_cpu:
            return None
        threads = 1 if rows * size < _MANY_GATED else torch.get_num_threads()
        self._gate(x.data_ptr(), out.data_ptr(), rows, size, stride, out_stride, kind, code, threads)
        return out


def _is_norm(weight: Tensor, dim: int) -> bool:
    """Whether a norm's weights are what the C function takes.

    Raises:
        ValueError: They are not for heads of this size.
    """
    if weight.shape != (dim,):
        raise ValueError(f"the norm's weight must be [{dim}] for heads of {dim}, not {list(weight.shape)}")
    return weight.dtype is _FLOAT32 and weight.is_contiguous()
