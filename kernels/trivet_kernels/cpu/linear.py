"""Products with weights of four and eight bits by the native kernels (csrc/matmul*.c)."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from trivet_kernels.cpu import build
from trivet_kernels.cpu.block import GATES, NO_GATE, Product
from trivet_kernels.cpu.memory import room

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.ops import Gate
    from trivet_kernels.reference.quantized import QuantizedMatrix

#: columns of a panel, as in csrc/matmul.h
PANEL = 32
#: integer sums over a segment stay below 2**31
MAX_SEGMENT = 65536
_ROUNDED_GROUP = 32
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Layer(ctypes.Structure):
    """``QuantLinear`` of csrc/matmul.h."""

    _fields_: ClassVar = [
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("segment", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("act_segments", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("zero_point", ctypes.c_int32),
        ("wide_scale", ctypes.c_int32),
        ("row_scale", ctypes.c_int32),
        ("planes", ctypes.c_int32),
        ("factor", ctypes.c_float),
    ]


class _Geometry(NamedTuple):
    """How a row is divided."""

    segment: int  #: values that are multiplied as integers before a scale is applied
    segments: int  #: in a row, as many as fill the groups of activations
    act_segments: int  #: segments that share a scale of the activations
    row_scale: bool  #: whether a row of weights has one scale and several segments

    @classmethod
    def of(cls, in_features: int, segment: int, *, offsets: bool, act_group: int | None) -> _Geometry:
        """Arguments as those of :class:`QuantizedLinear`."""
        # With one scale in a row of weights, what a segment is in the kernel is up to the activations.
        row_scale = act_group is not None and act_group < min(segment, in_features) and segment >= in_features
        assert not (row_scale and offsets)
        if row_scale:
            assert act_group is not None
            assert act_group % 16 == 0
            segment = act_group
        act_segments = None if act_group is None else act_group // segment
        segments = -(-in_features // segment)
        if act_segments is not None and act_segments < segments:
            segments = -(-segments // act_segments) * act_segments
        return cls(segment, segments, min(segments, act_segments or segments), row_scale)


class QuantizedLinear:
    """A packed matrix and bias. Rows of activations are rounded to eight or sixteen bits in each call.

    The matrix is packed part by part (:meth:`put`), so that a large one need not be in memory twice.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        segment: int,
        bits: int,
        zero_point: int,
        offsets: bool = False,
        wide_scale: bool = False,
        factor: float = 1.0,
        act_group: int | None = None,
        act_bits: int = 8,
        bias: Tensor | None = None,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """Room for a matrix of the given kind; see :class:`trivet_kernels.reference.quantized.QuantizedMatrix`.

        Args:
            in_features: Size of a row of activations.
            out_features: Size of a row of results.
            segment: Values along a row that share a scale, a multiple of 16, at most 65,536.
            bits: 4 or 8.
            zero_point: The stored value that stands for zero.
            offsets: Whether segments have offsets.
            wide_scale: Keep scales in float32 instead of float16.
            factor: Scales and offsets are stored as multiples of it, so that they are in float16's range.
            act_group: Values of an activation that share a scale: a multiple of ``segment``, or None for whole rows.
                It is shortened to the row. If ``segment`` is the whole row and there are no offsets, it may be any
                multiple of 16, too.
            act_bits: 8 or 16 bits for an activation; with 16 each is rounded to two bytes.
            bias: ``[out]`` float32.
            library: The compiled kernels, by default those for this processor.

        Raises:
            trivet_kernels.cpu.build.BuildError: There are no compiled kernels.
        """
        functions = _functions(library or _library())
        assert bits in {4, 8}
        assert act_bits in {8, 16}
        assert segment % 16 == 0
        assert segment <= MAX_SEGMENT
        self.in_features = in_features
        self.out_features = out_features
        form = _Geometry.of(in_features, segment, offsets=offsets, act_group=act_group)
        self._matrix_segment = segment
        segment, segments, row_scale = form.segment, form.segments, form.row_scale
        panels = -(-out_features // PANEL)
        self._weight = room(panels * PANEL * segments * segment * bits // 8)
        scale_type = torch.float32 if wide_scale else torch.float16
        self._scale = torch.zeros(panels, 1 if row_scale else segments, PANEL, dtype=scale_type)
        self._offset = torch.zeros(panels, segments, PANEL, dtype=torch.float16) if offsets else None
        self._bias = None if bias is None else bias.float().contiguous()
        self._layer = _Layer(
            weight=self._weight.data_ptr(),
            scale=self._scale.data_ptr(),
            offset=None if self._offset is None else self._offset.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            in_features=in_features,
            out_features=out_features,
            segment=segment,
            num_segments=segments,
            act_segments=form.act_segments,
            bits=bits,
            zero_point=zero_point,
            wide_scale=wide_scale,
            row_scale=row_scale,
            planes=act_bits // 8,
            factor=factor,
        )
        self._address = ctypes.addressof(self._layer)
        self._multiply, self._pack, address = functions
        #: for native code; valid while this object lives
        self.product = Product(address, self._address, out_features, self._can_gate)

    @classmethod
    def of(
        cls,
        matrix: QuantizedMatrix,
        bias: Tensor | None = None,
        *,
        wide_scale: bool = False,
        act_group: int | None = None,
        act_bits: int = 8,
        library: ctypes.CDLL | None = None,
    ) -> QuantizedLinear:
        """Pack a whole matrix."""
        layer = cls(
            matrix.in_features,
            matrix.out_features,
            segment=matrix.segment,
            bits=matrix.bits,
            zero_point=matrix.zero_point,
            offsets=matrix.offset is not None,
            wide_scale=wide_scale,
            act_group=act_group,
            act_bits=act_bits,
            bias=bias,
            library=library,
        )
        layer.put(matrix)
        return layer

    def put(self, matrix: QuantizedMatrix, first: int = 0) -> None:
        """Pack rows of the matrix, the first of which is row ``first``. Scales are rounded to float16 unless they are
        wide.

        Raises:
            OverflowError: A scale is beyond the range of float16.
            ValueError: A scale or an offset is NaN or infinite, as weights that hold such values have it.
        """
        layer = self._layer
        assert (matrix.in_features, matrix.segment, matrix.bits, matrix.zero_point) == (
            layer.in_features,
            self._matrix_segment,
            layer.bits,
            layer.zero_point,
        )
        assert first + matrix.out_features <= self.out_features
        values = matrix.values.contiguous()
        self._pack(self._address, values.data_ptr(), values.shape[1], first, len(values), torch.get_num_threads())
        rows = torch.arange(first, first + len(values))
        for stored, given in ((self._scale, matrix.scale), (self._offset, matrix.offset)):
            if stored is not None and given is not None:
                scaled = (given / layer.factor).to(stored.dtype)
                if not scaled.isfinite().all():
                    if not given.isfinite().all():
                        row = first + int((~given.isfinite()).any(1).nonzero()[0])
                        raise ValueError(f"a scale or an offset of row {row} is NaN or infinite")
                    raise OverflowError(f"a scale of {given.abs().max().item():g} is too large for float16")
                stored.transpose(1, 2)[rows // PANEL, rows % PANEL, : given.shape[1]] = scaled

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` ``[T, in]`` float32 or bfloat16 (other types are converted), rows may be strided. Writes to ``out``
        ``[T, out]``, whose rows may be strided too, or to a new tensor of the type of ``x``."""
        return self._product(x, NO_GATE, self.out_features, out)

    def gated(self, x: Tensor, activation: Gate, out: Tensor | None = None) -> Tensor | None:
        """``activation`` of the first half of the outputs, times the second half.

        Args:
            x: As for a call.
            activation: Of the gate: SiLU, or GELU with tanh or exact.
            out: ``[T, out / 2]``, otherwise as for a call.

        Returns:
            The bits that :meth:`__call__` gives, rounded to the type of the result, and the operation after it; None
            if each half is not a multiple of 32 outputs, and for other types than float32 and bfloat16.
        """
        if not self._can_gate or x.dtype not in _DTYPES:
            return None
        return self._product(x, GATES[activation], self.out_features // 2, out)

    @property
    def _can_gate(self) -> bool:
        return self.out_features % (2 * PANEL) == 0

    def _product(self, x: Tensor, gate: int, columns: int, out: Tensor | None) -> Tensor:
        if out is not None and out.dtype not in _DTYPES:
            return out.copy_(self._product(x, gate, columns, None))
        dtype, number = x.dtype, _DTYPES.get(x.dtype)
        rows, stride = x.shape[0], x.stride()
        if number is None or stride[1] != 1:
            wide = x.contiguous() if dtype in _DTYPES else x.float()
            result = self._product(wide, gate, columns, out)
            return result if out is not None else result.to(dtype)
        if out is None:
            out, out_stride, out_number = torch.empty((rows, columns), dtype=dtype), columns, number
        else:
            out_stride, out_number = out.stride(0), _DTYPES[out.dtype]
        if self._multiply(
            self._address,
            x.data_ptr(),
            stride[0],
            number,
            rows,
            out.data_ptr(),
            out_stride,
            out_number,
            gate,
            torch.get_num_threads(),
        ):
            raise MemoryError(f"no memory for {rows} rows of {self.in_features} rounded activations")
        return out

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that weights, scales, offsets and bias take."""
        tensors = (self._weight, self._scale, self._offset, self._bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @staticmethod
    def planned_bytes(
        in_features: int,
        out_features: int,
        *,
        segment: int,
        bits: int,
        offsets: bool = False,
        wide_scale: bool = False,
        act_group: int | None = None,
        bias: bool = False,
    ) -> int:
        """What :attr:`weight_bytes` is of a layer of these arguments; needs no compiled kernels."""
        form = _Geometry.of(in_features, segment, offsets=offsets, act_group=act_group)
        rows = -(-out_features // PANEL) * PANEL
        weight = rows * form.segments * form.segment * bits // 8
        scale = rows * (1 if form.row_scale else form.segments) * (4 if wide_scale else 2)
        offset = rows * form.segments * 2 if offsets else 0
        return weight + scale + offset + (out_features * 4 if bias else 0)


def round_to_four(
    groups: Tensor, *, offsets: bool, library: ctypes.CDLL | None = None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Round groups of 32 weights to four bits with a small squared error (csrc/matmul_round.c).

    Args:
        groups: ``[rows, groups, 32]`` float32.
        offsets: Sixteen levels anywhere, stored as 0 … 15; otherwise -8 … 7 times a scale, stored with 8 added.
        library: The compiled kernels, by default those for this processor.

    Returns:
        Values ``[rows, groups, 32]`` uint8, scales ``[rows, groups]`` and offsets of that shape (None without), in
        float32. A group that is not finite has the scale NaN. None if there are no compiled kernels.
    """
    library = library or build.library()
    if library is None:
        return None
    groups = groups.contiguous()
    assert groups.dtype == torch.float32
    assert groups.shape[-1] == _ROUNDED_GROUP
    values = torch.empty(groups.shape, dtype=torch.uint8)
    scale = torch.empty(groups.shape[:-1])
    offset = torch.empty_like(scale) if offsets else None
    function = library.trivet_round_four
    function.restype = None
    pointer = ctypes.c_void_p
    function(
        pointer(groups.data_ptr()),
        ctypes.c_int64(scale.numel()),
        pointer(values.data_ptr()),
        pointer(scale.data_ptr()),
        pointer(None if offset is None else offset.data_ptr()),
        ctypes.c_int(torch.get_num_threads()),
    )
    return values, scale, offset


def _library() -> ctypes.CDLL:
    found = build.library()
    if found is None:
        raise build.BuildError(build.problem() or "there are no native CPU kernels")
    return found


@functools.cache
def _functions(library: ctypes.CDLL) -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer, int]:
    """The product and the packing, with their signatures, and the address of the product for native code."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    multiply, pack = library.trivet_quant_linear, library.trivet_quant_pack
    multiply.argtypes = [pointer, pointer, size, number, size, pointer, size, number, number, number]
    multiply.restype = number
    pack.argtypes = [pointer, pointer, size, size, size, number]
    pack.restype = None
    address = ctypes.cast(library.trivet_quant_multiply, pointer).value
    assert address is not None
    return multiply, pack, address
