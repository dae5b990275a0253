"""Products with weights of four and eight bits on CUDA and ROCm devices.

Weights become floats in registers, tile by tile, and are multiplied in the type of the activations, with sums in
float32; nothing is read back from the device.

Layout: a row of weights is divided into *chunks* of up to 64 values, which have one scale. ``values`` is
``[chunks, outputs, chunk]`` bytes, so that the part of a chunk that a program reads lies in one piece; with four bits a
byte holds a value of chunk ``2 i`` in its lower half and one of chunk ``2 i + 1`` in its upper half. Scales are
``[groups, outputs]``: float32, or float16 with those of two neighbouring groups in one word ``[groups / 2, outputs]``,
since four bytes are the least that is fetched in advance.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from trivet_kernels.triton.compat import INTERPRETED, architecture, jit

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.reference.quantized import QuantizedMatrix

#: outputs and values of a row are filled up with zeros to multiples of these
_OUTPUTS, _STEP = 64, 128
_LONGEST_CHUNK = 64
# Of sizes and strides that are multiples of it Triton knows that they are.
_ALIGNED = 16
_LONGEST_GROUP = 128


class Tile(NamedTuple):
    """Outputs and rows that a program takes, and how it is compiled."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int
    options: dict[str, Any]


@jit()
def _unpaired(word: tl.tensor, upper: tl.constexpr) -> tl.tensor:
    """One of the two float16 numbers in each word, in float32."""
    bits = (word >> 16) if upper else word
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@jit(unspecialized=("rows",))
def product_kernel(  # noqa: C901 - a kernel is one piece
    out: tl.tensor,
    x: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    in_features: tl.tensor,
    out_features: tl.tensor,
    x_row_stride: tl.tensor,
    out_row_stride: tl.tensor,
    num_steps: tl.tensor,
    outputs: tl.tensor,
    bits: tl.constexpr,
    zero_point: tl.constexpr,
    factor: tl.constexpr,
    chunk: tl.constexpr,
    chunks: tl.constexpr,
    scale_chunks: tl.constexpr,
    even: tl.constexpr,
    precision: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
) -> None:
    """``block_m`` rows of ``out`` and ``block_n`` of its columns; grid: (tiles of rows, tiles of columns).

    Weights are the left factor: matrix units take 64 rows or more of it and 8 or more columns of the right one, so few
    rows and many of ``x`` are multiplied by the same instruction. The sum over a row of weights is made chunk after
    chunk, whatever the tile. Hence a row's result does not depend on how many rows there are.
    """
    # An integer in the mantissa of a number between 1 and 2 is a float without a conversion: 2 - value / 256, which
    # takes an instruction less, or 1 + value / 16.
    turn: tl.constexpr = -256 if bits == 8 else 16
    base: tl.constexpr = (512 if bits == 8 else -16) - zero_point
    paired: tl.constexpr = scale.dtype.element_ty == tl.int32
    row = tl.program_id(0) * block_m + tl.arange(0, block_m)
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    place = tl.arange(0, chunk)
    in_rows = row < rows
    x_at = x + row.to(tl.int64) * x_row_stride
    tile = column[:, None] * chunk + place[None, :]
    wide_outputs = outputs.to(tl.int64)
    if scale_chunks == 0:
        slope = tl.load(scale + column) * factor
        start = slope * base
        if offset is not None:
            start += tl.load(offset + column) * factor
    acc = tl.zeros([block_n, block_m], tl.float32)
    for step in range(num_steps):
        for part in tl.static_range(chunks):
            number = step * chunks + part
            if bits == 8:
                stored = tl.load(values + number * (wide_outputs * chunk) + tile).to(tl.uint32)
                code = 0x40000000 - (stored << 15)
            elif part % 2 == 0:
                stored = tl.load(values + (number // 2) * (wide_outputs * chunk) + tile).to(tl.uint32)
                code = ((stored << 19) & 0x780000) | 0x3F800000
            else:
                code = ((stored << 15) & 0x780000) | 0x3F800000
            if scale_chunks > 0 and part % scale_chunks == 0:
                if not paired:
                    slope = tl.load(scale + (number // scale_chunks) * wide_outputs + column) * factor
                    start = slope * base
                else:
                    if part % 2 == 0:
                        scales = tl.load(scale + (number // 2) * wide_outputs + column)
                        if offset is not None:
                            offsets = tl.load(offset + (number // 2) * wide_outputs + column)
                    slope = _unpaired(scales, part % 2 == 1) * factor
                    start = slope * base
                    if offset is not None:
                        start += _unpaired(offsets, part % 2 == 1) * factor
            weight = tl.fma(code.to(tl.float32, bitcast=True), (slope * turn)[:, None], start[:, None])
            at = number * chunk + place
            mask = in_rows[None, :]
            if not even:
                mask = mask & (at < in_features)[:, None]
            piece = tl.load(x_at[None, :] + at[:, None], mask=mask, other=0.0)
            if INTERPRETED:
                piece = piece.to(tl.float32)
            acc = tl.dot(weight.to(piece.dtype), piece, acc, input_precision=precision)
    in_columns = column < out_features
    if bias is not None:
        acc += tl.load(bias + column, mask=in_columns, other=0.0)[:, None]
    out_at = out + row.to(tl.int64)[None, :] * out_row_stride + column[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=in_rows[None, :] & in_columns[:, None])


class Geometry(NamedTuple):
    """How a row of weights is divided."""

    chunk: int
    scale_chunks: int  #: chunks that share a scale; 0 if the whole row does
    outputs: int  #: rows of weights with those that fill the last panel
    values: int  #: in a row, with those that fill the last step
    groups: int  #: scales of a row, with those that fill the last step
    wide: bool  #: whether scales are float32, else pairs of float16

    @classmethod
    def of(cls, in_features: int, out_features: int, segment: int, *, wide_scale: bool) -> Geometry:
        """Arguments as those of :class:`QuantizedLinear`."""
        outputs, values = (-(-size // unit) * unit for size, unit in ((out_features, _OUTPUTS), (in_features, _STEP)))
        if segment >= in_features:
            return cls(_LONGEST_CHUNK, 0, outputs, values, 1, wide=True)
        if segment > _LONGEST_GROUP or segment & (segment - 1):
            raise ValueError(f"groups of {segment} values are neither a power of two up to {_LONGEST_GROUP} nor a row")
        chunk = min(segment, _LONGEST_CHUNK)
        return cls(chunk, segment // chunk, outputs, values, values // segment, wide=wide_scale or segment > chunk)

    def shapes(self, bits: int, *, offsets: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
        """Of values (bytes), scales and offsets (four bytes each)."""
        groups = self.groups if self.wide else self.groups // 2
        scales = (groups, self.outputs)
        values = (self.values * bits // (8 * self.chunk), self.outputs, self.chunk)
        return values, scales, scales if offsets else None


def choose_tile(rows: int, form: Geometry, bits: int, dtype: torch.dtype, arch: str, *, aligned: bool) -> Tile:
    """How ``rows`` rows are multiplied on an architecture; ``aligned``: whether they are fetched in whole words."""
    # Matrix instructions of one size: others add the products of more or fewer values at a time.
    options = {"matrix_instr_nonkdim": 16} if arch.startswith("gfx") else {}
    if dtype == torch.float32:
        return Tile(32, 16, 4, 2, options)
    # What is not fetched in whole words passes through registers.
    block_m = min(128 if aligned else 64, max(16, triton.next_power_of_2(rows)))
    few = block_m <= 32
    narrow = block_m < 128 or form.outputs % 128 > 0
    if arch.startswith("gfx"):
        num_stages = 2
    elif arch.startswith(("sm_9", "sm_10")):
        # With few rows weights must be on their way for all of the time that memory takes to answer.
        num_stages = 8 if few else 4
    else:
        # 99 KiB of shared memory are all that most have.
        num_stages = 4 if few else 3
        narrow = narrow or (bits == 8 and form.chunk < _LONGEST_CHUNK)
    block_n = 64 if narrow else 128
    return Tile(block_n, block_m, block_n // 16, num_stages, options)


class QuantizedLinear:
    """A packed matrix and bias on a device. Activations are multiplied as they are.

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
        bias: Tensor | None = None,
        device: torch.device | str,
    ) -> None:
        """Room for a matrix of the given kind; see :class:`trivet_kernels.reference.quantized.QuantizedMatrix`.

        Args:
            in_features: Size of a row of activations.
            out_features: Size of a row of results.
            segment: Values along a row that share a scale: 16, 32, 64, 128, or the whole row and more.
            bits: 4 or 8.
            zero_point: The stored value that stands for zero.
            offsets: Whether segments have offsets.
            wide_scale: Keep scales in float32 instead of float16.
            factor: Scales and offsets are stored as multiples of it, so that they are in float16's range.
            bias: ``[out]`` of any type; kept in float32.
            device: Where it is kept and multiplied.

        Raises:
            ValueError: Segments of another size, or wide ones with offsets.
        """
        self._geometry = form = Geometry.of(in_features, out_features, segment, wide_scale=wide_scale)
        if offsets and form.wide and form.scale_chunks:
            raise ValueError("groups with offsets have float16 scales and up to 64 values")
        self.in_features, self.out_features = in_features, out_features
        self._segment, self._bits, self._zero_point, self._factor = segment, bits, zero_point, factor
        values, scales, offset_shape = form.shapes(bits, offsets=offsets)
        kind = torch.float32 if form.wide else torch.int32
        self._values = torch.zeros(values, dtype=torch.uint8, device=device)
        self._scale = torch.zeros(scales, dtype=kind, device=device)
        self._offset = None if offset_shape is None else torch.zeros(offset_shape, dtype=kind, device=device)
        self._bias = None if bias is None else bias.to(device, torch.float32).contiguous()
        self._arch = architecture(self._values.device)

    def put(self, matrix: QuantizedMatrix, first: int = 0) -> None:
        """Pack rows of the matrix, the first of which is row ``first``. Scales are rounded to float16 unless they are
        wide.

        Raises:
            OverflowError: A scale is beyond the range of float16.
            ValueError: A scale or an offset is NaN or infinite, as weights that hold such values have it.
        """
        form, rows = self._geometry, slice(first, first + matrix.out_features)
        assert (matrix.in_features, matrix.bits, matrix.zero_point) == (self.in_features, self._bits, self._zero_point)
        assert rows.stop <= self.out_features
        device = self._values.device
        values = torch.zeros(matrix.out_features, form.values, dtype=torch.uint8, device=device)
        values[:, : self.in_features] = matrix.values[:, : self.in_features].to(device)
        if self._bits == 4:
            pairs = values.view(len(values), -1, 2, form.chunk)
            values = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
        self._values[:, rows] = values.reshape(len(values), -1, form.chunk).transpose(0, 1)
        for stored, given in ((self._scale, matrix.scale), (self._offset, matrix.offset)):
            if stored is not None and given is not None:
                _put_scales(stored, given.to(device), rows, self._factor)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` ``[T, in]`` bfloat16, float16 or float32, rows may be strided. Writes to ``out`` ``[T, out]``, with
        rows that may be strided too, or to a new tensor of the type of ``x``."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        if out is None:
            out = torch.empty(rows, self.out_features, dtype=x.dtype, device=x.device)
        if rows == 0:
            return out
        form = self._geometry
        aligned = self.in_features % _ALIGNED == x.stride(0) % _ALIGNED == 0
        tile = choose_tile(rows, form, self._bits, x.dtype, self._arch, aligned=aligned)
        product_kernel[(triton.cdiv(rows, tile.block_m), form.outputs // tile.block_n)](
            out,
            x,
            self._values,
            self._scale,
            self._offset,
            self._bias,
            rows,
            self.in_features,
            self.out_features,
            x.stride(0),
            out.stride(0),
            form.values // _STEP,
            form.outputs,
            bits=self._bits,
            zero_point=self._zero_point,
            factor=self._factor,
            chunk=form.chunk,
            chunks=_STEP // form.chunk,
            scale_chunks=form.scale_chunks,
            even=form.values == self.in_features,
            precision="ieee",
            block_n=tile.block_n,
            block_m=tile.block_m,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
            **tile.options,
        )
        return out

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that weights, scales, offsets and bias take."""
        tensors = (self._values, self._scale, self._offset, self._bias)
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
        bias: bool = False,
    ) -> int:
        """What :attr:`weight_bytes` is of a layer of these arguments."""
        form = Geometry.of(in_features, out_features, segment, wide_scale=wide_scale)
        values, scales, offset_shape = form.shapes(bits, offsets=offsets)
        numbers = math.prod(scales) * (1 if offset_shape is None else 2)
        return math.prod(values) + 4 * numbers + (out_features * 4 if bias else 0)


def _put_scales(stored: Tensor, given: Tensor, rows: slice, factor: float) -> None:
    """Write ``given`` ``[rows, groups]`` float32 to columns of ``stored``, as multiples of ``factor``."""
    if not given.isfinite().all():
        row = rows.start + int((~given.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"a scale or an offset of row {row} is NaN or infinite")
    scaled = (given / factor).T
    if stored.dtype == torch.float32:
        stored[: len(scaled), rows] = scaled
        return
    halves = torch.zeros(2 * len(stored), scaled.shape[1], dtype=torch.float16, device=stored.device)
    halves[: len(scaled)] = scaled
    if not halves.isfinite().all():
        raise OverflowError(f"a scale of {given.abs().max().item():g} is too large for float16")
    # The number of the even group is in the lower half of a word, on devices as on their hosts.
    pairs = halves.view(len(stored), 2, -1).transpose(1, 2).contiguous()
    stored[:, rows] = pairs.view(torch.int32).squeeze(-1)
