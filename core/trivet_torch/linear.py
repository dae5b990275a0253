"""What a model multiplies with, whatever its weights are stored as."""

from __future__ import annotations

import ctypes
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trivet_kernels.cpu import tiles
from trivet_kernels.cpu.packed import MAX_ROWS, packed_rows
from trivet_torch.allocator import trim
from trivet_torch.weights.gguf_dequant import run_jobs

if TYPE_CHECKING:
    from trivet_kernels.cpu.block import Product
    from trivet_kernels.ops import Gate

# Rows of a matrix that are packed at a time take so many bytes, ...
_PIECE_BYTES = 4 << 20
# ... and are a multiple of the rows in a block of oneDNN's layouts (at most 64).
_BLOCK_ROWS = 64
# A matrix by itself up to this size is packed in one go: fewer steps, and a second copy of it is no harm.
_WHOLE_BYTES = 4 << 20
# See madvise(2) of Linux; the size of a huge page on x86-64 and most others.
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_HUGE_PAGE = 2 << 20
# After a matrix of this size the allocator gives back what packing has used.
_TRIM_BYTES = 8 << 20


class Matrix(Protocol):
    """A matrix ``[rows, columns]`` that is read some rows at a time, such as
    :class:`trivet_torch.weights.stored.StoredMatrix`."""

    @property
    def shape(self) -> Sequence[int]:
        """``(rows, columns)``."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``[start, stop)``; called from several threads."""

    def release(self, start: int, stop: int) -> None:
        """Rows ``[start, stop)`` are not used any more, and will not be asked for again."""


class Linear(ABC):
    """A matrix product with a bias or without. ``Quantization.linear`` returns one, and so do the packed and the plain
    layers here."""

    in_features: int
    out_features: int
    #: whether its product can be recorded into a CUDA graph: nothing is read from the device, and nothing decided by
    #: what tensors hold
    capturable: bool = False

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[T, in_features]``, rows may be strided; returns ``[T, out_features]`` in the type of ``x``."""

    def gated(self, x: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor | None:
        """A gated activation in one go with the product, for a layer that can: ``activation`` of the first half of the
        outputs, times the second half.

        Args:
            x: ``[T, in_features]``, rows may be strided.
            activation: Of the gate.
            out: ``[T, out_features / 2]`` in the type of ``x``, for the result; a new tensor by default.

        Returns:
            What the operations one after the other would give, bit for bit; None if the layer cannot do this, which
            does not depend on ``x`` but for its type.
        """
        return None

    @property
    def products(self) -> Sequence[Product]:
        """How native code on the CPU computes it, side by side, valid while the layer lives; empty if it cannot."""
        return ()

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of memory that its weights take, scales and bias included."""


class PlainLinear(Linear):
    """A product with a matrix in torch's own layout, on any device."""

    capturable = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keep ``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]`` of the same type as they
        are."""
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        return functional.linear(x, self.weight, self.bias)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @staticmethod
    def planned_bytes(out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype) -> int:
        """What :attr:`weight_bytes` is of a layer of this size."""
        return (out_features * in_features + (out_features if bias else 0)) * dtype.itemsize


class PackedLinear(Linear):
    """A product with a matrix in the blocked layout of oneDNN's kernels, on the CPU.

    Without it the library brings the matrix into that layout in every call. The layout does not depend on the number
    of rows of the input. In bfloat16, where there is a native kernel for it, a few rows are multiplied by that.
    """

    def __init__(self, parts: Sequence[Tensor | Matrix], bias: Tensor | None = None, *, dtype: torch.dtype) -> None:
        """Pack ``parts``, matrices ``[out_i, in_features]``, one below the other; they are not kept.

        ``bias`` ``[out_features]`` in ``dtype`` is kept. See :func:`can_pack` for what is supported.
        """
        self.out_features = sum(part.shape[0] for part in parts)
        self.in_features = parts[0].shape[1]
        self.bias = bias
        self._packed = _pack(parts, dtype)
        if self.weight_bytes >= _TRIM_BYTES:
            trim()
        self._product = torch.ops.mkldnn._linear_pointwise.default
        shape = (self.out_features, self.in_features)
        self._rows = packed_rows(self._packed, shape) if dtype == torch.bfloat16 else None

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, self.out_features)
        if self._rows is not None and rows <= MAX_ROWS and x.dtype == torch.bfloat16 and x.stride(-1) == 1:
            return self._rows(x, self.bias)
        product: Tensor = self._product(x, self._packed, self.bias, "none", [], "")
        return product

    @property
    def weight_bytes(self) -> int:
        packed: int = torch.ops.mkldnn._nbytes(self._packed)
        return packed + (0 if self.bias is None else self.bias.nbytes)

    @staticmethod
    def planned_bytes(out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype) -> int:
        """What :attr:`weight_bytes` is of a layer of this size.

        The layout is the library's, which fills rows and columns up as it likes. It is asked for the last rows and for
        a full block of them, a small part of the matrix."""
        whole = max(out_features // _BLOCK_ROWS - 1, 0)
        rest = _packed_bytes(out_features - whole * _BLOCK_ROWS, in_features, dtype)
        blocks = whole * _packed_bytes(_BLOCK_ROWS, in_features, dtype) if whole else 0
        return blocks + rest + (out_features * dtype.itemsize if bias else 0)


class TiledLinear(Linear):
    """A product with a bfloat16 matrix by the matrix tiles of the processor (AMX). A row's results do not depend on the
    number of rows."""

    def __init__(self, parts: Sequence[Tensor | Matrix], bias: Tensor | None = None) -> None:
        """Pack ``parts``, matrices ``[out_i, in_features]``, one below the other; they are not kept.

        ``bias`` ``[out_features]`` bfloat16 is kept.
        """
        self.out_features = sum(part.shape[0] for part in parts)
        self.in_features = parts[0].shape[1]
        self._matrix = matrix = tiles.TiledMatrix(self.in_features, self.out_features, bias)

        def fill(piece: _Piece) -> None:
            matrix.put(piece.read().to(torch.bfloat16).contiguous(), piece.row)
            piece.release()

        run_jobs(partial(fill, piece) for piece in _pieces(parts, torch.bfloat16))

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        return self._matrix(_dense(x)).to(x.dtype)

    def gated(self, x: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor | None:
        """``[T, in_features]`` -> ``[T, out_features / 2]``."""
        if not self._matrix.can_gate:
            return None
        if x.dtype != torch.bfloat16:
            return None
        return self._matrix(_dense(x), activation, out)

    @property
    def products(self) -> Sequence[Product]:
        return (self._matrix.product,)

    @property
    def weight_bytes(self) -> int:
        bias = self._matrix.bias
        return self._matrix.num_bytes + (0 if bias is None else bias.nbytes)

    @staticmethod
    def planned_bytes(out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype) -> int:
        """What :attr:`weight_bytes` is of a layer of this size."""
        packed = tiles.TiledMatrix.planned_bytes(out_features, in_features)
        return packed + (out_features * dtype.itemsize if bias else 0)


def _dense(x: Tensor) -> Tensor:
    """In bfloat16, with rows that have no gaps within."""
    return x if x.dtype == torch.bfloat16 and x.stride(-1) == 1 else x.to(torch.bfloat16).contiguous()


def can_pack(dtype: torch.dtype, device: str | torch.device) -> bool:
    """Whether :class:`PackedLinear` works for ``dtype`` on ``device``, with this processor and this build of torch."""
    if torch.device(device).type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def make_linear(
    parts: Sequence[Tensor | Matrix],
    biases: Sequence[Tensor | None] | None = None,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
) -> Linear:
    """The fastest layer that puts the outputs of ``parts`` side by side.

    Args:
        parts: Matrices ``[out_i, in_features]`` of any type; views of a file are fine. None of them is kept, and with
            a :class:`Matrix` only a few MiB of it are in memory at a time.
        biases: One per part, ``[out_i]`` or None for zeros; None if no part has one.
        dtype: Of the layer's weights and inputs.
        device: Where it computes.
    """
    bias = _joined_bias(parts, biases or [], dtype, device)
    if _can_tile(dtype, device):
        return TiledLinear(parts, bias)
    if can_pack(dtype, device):
        return PackedLinear(parts, bias, dtype=dtype)
    return PlainLinear(_joined(parts, dtype, device), bias)


def planned_bytes(
    out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype, device: str | torch.device
) -> int:
    """The ``weight_bytes`` of what :func:`make_linear` makes of matrices with ``out_features`` rows in all."""
    kind = TiledLinear if _can_tile(dtype, device) else PackedLinear if can_pack(dtype, device) else PlainLinear
    return kind.planned_bytes(out_features, in_features, bias=bias, dtype=dtype)


def _can_tile(dtype: torch.dtype, device: str | torch.device) -> bool:
    return dtype == torch.bfloat16 and torch.device(device).type == "cpu" and tiles.has_tiles()


class _Piece:
    """Rows ``[start, stop)`` of ``part``, which are rows from ``row`` on of the joined matrix."""

    def __init__(self, part: Tensor | Matrix, start: int, stop: int, row: int) -> None:
        self._part, self._start, self._stop = part, start, stop
        self.row = row
        self.num_rows = stop - start

    def read(self) -> Tensor:
        if isinstance(self._part, Tensor):
            return self._part[self._start : self._stop]
        return self._part.rows(self._start, self._stop)

    def release(self) -> None:
        if not isinstance(self._part, Tensor):
            self._part.release(self._start, self._stop)


def _pieces(parts: Sequence[Tensor | Matrix], dtype: torch.dtype) -> list[_Piece]:
    in_features = parts[0].shape[1]
    step = max(1, _PIECE_BYTES // (in_features * dtype.itemsize * _BLOCK_ROWS)) * _BLOCK_ROWS
    pieces: list[_Piece] = []
    row = 0
    for part in parts:
        num_rows = part.shape[0]
        pieces += [_Piece(part, i, min(i + step, num_rows), row + i) for i in range(0, num_rows, step)]
        row += num_rows
    return pieces


def _joined(parts: Sequence[Tensor | Matrix], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """``parts`` one below the other in new memory."""
    weight = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=dtype, device=device)

    def fill(piece: _Piece) -> None:
        weight[piece.row : piece.row + piece.num_rows] = piece.read()
        piece.release()

    run_jobs(partial(fill, piece) for piece in _pieces(parts, dtype))
    return weight


def _joined_bias(
    parts: Sequence[Tensor | Matrix], biases: Sequence[Tensor | None], dtype: torch.dtype, device: str | torch.device
) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(part.shape[0], dtype=dtype, device=device) if bias is None else bias.to(device, dtype)
            for part, bias in zip(parts, biases, strict=True)
        ]
    )


def _pack(parts: Sequence[Tensor | Matrix], dtype: torch.dtype) -> Tensor:
    """``parts`` one below the other in the layout that the library chooses.

    Its layouts are blocks of rows in order, so the matrix is packed some rows at a time and is never there twice. The
    layout is the library's own affair: if the outcome does not multiply as its pieces do, the whole is packed at once.
    """
    size = sum(part.shape[0] for part in parts) * parts[0].shape[1] * dtype.itemsize
    if len(parts) == 1 and size <= _WHOLE_BYTES:
        return _packed_whole(parts[0], dtype)
    if all(part.shape[0] % _BLOCK_ROWS == 0 for part in parts[:-1]):
        packed = _packed_in_pieces(parts, dtype)
        if packed is not None:
            return packed
    return _packed_whole(_joined(parts, dtype, "cpu"), dtype)


def _packed_whole(part: Tensor | Matrix, dtype: torch.dtype) -> Tensor:
    piece = _Piece(part, 0, part.shape[0], 0)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(piece.read().to(dtype), None)
    piece.release()
    return packed


@functools.cache
def _packed_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.empty(rows, columns, dtype=dtype), None)
    size: int = torch.ops.mkldnn._nbytes(packed)
    return size


def _packed_in_pieces(parts: Sequence[Tensor | Matrix], dtype: torch.dtype) -> Tensor | None:
    """The packed matrix, or None if its layout is not that of its pieces in order."""
    ops = torch.ops.mkldnn
    out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
    # Memory that was never written is read as the system's page of zeros, so this source takes no memory.
    packed: Tensor = ops._reorder_linear_weight(torch.empty(out_features, in_features, dtype=dtype), None)
    start, size = ops.data_ptr(packed), ops._nbytes(packed)
    _use_huge_pages(start, size)
    row_bytes = size // (-(-out_features // _BLOCK_ROWS) * _BLOCK_ROWS)
    probe = torch.randn(1, in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.empty(1, out_features, dtype=dtype)
    unlike: list[_Piece] = []

    def fill(piece: _Piece) -> None:
        block = ops._reorder_linear_weight(piece.read().to(dtype), None)
        piece.release()
        offset, block_bytes = piece.row * row_bytes, ops._nbytes(block)
        if offset + block_bytes > size:
            unlike.append(piece)
            return
        ctypes.memmove(start + offset, ops.data_ptr(block), block_bytes)
        product = ops._linear_pointwise(probe, block, None, "none", [], "")
        expected[:, piece.row : piece.row + piece.num_rows] = product

    run_jobs(partial(fill, piece) for piece in _pieces(parts, dtype))
    if unlike:
        return None
    product = ops._linear_pointwise(probe, packed, None, "none", [], "")
    scale = float(expected.abs().nan_to_num(0.0, 0.0).max()) + 1e-30
    return packed if torch.allclose(product, expected, rtol=0.02, atol=0.02 * scale, equal_nan=True) else None


def _use_huge_pages(start: int, size: int) -> None:
    """Ask for huge pages under memory that holds zeros: weights are read from end to end in every step, and the
    translation of addresses costs a sixth of that with small ones. The pages are given back and come anew, as zeros."""
    begin, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, (start + size) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform != "linux" or end <= begin:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(begin, end - begin, _MADV_HUGEPAGE) == 0:
        madvise(begin, end - begin, _MADV_DONTNEED)
