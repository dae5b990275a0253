"""Layers that multiply with packed weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from trivet.errors import ModelLoadError
from trivet_kernels.cpu import build
from trivet_kernels.cpu.linear import QuantizedLinear
from trivet_torch.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.cpu.block import Product
    from trivet_kernels.reference.quantized import QuantizedMatrix
    from trivet_quantization.formats import Format, Source

# Elements that are converted at a time.
_CHUNK = 1 << 19


class PackedLayer(Linear):
    """A layer with packed weights of one format."""

    @abstractmethod
    def put(self, matrix: QuantizedMatrix, first: int = 0) -> None:
        """Pack rows of the weights, the first of which is row ``first``; OverflowError if a scale is beyond the range
        of its type."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` ``[T, in_features]``; the result ``[T, out_features]`` is ``out`` where that is given."""


class PackedQuantizedLinear(QuantizedLinear, PackedLayer):
    """Packed weights of one format, for a CPU."""

    @property
    def products(self) -> Sequence[Product]:
        return (self.product,)


class JoinedLinear(Linear):
    """Layers of several formats side by side."""

    def __init__(self, layers: Sequence[PackedLayer]) -> None:
        """Join layers with the same inputs."""
        self.capturable = all(layer.capturable for layer in layers)
        self.in_features = layers[0].in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self._layers = tuple(layers)

    @property
    def products(self) -> Sequence[Product]:
        parts = [layer.products for layer in self._layers]
        return [product for part in parts for product in part] if all(parts) else ()

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        out = x.new_empty(x.shape[0], self.out_features)
        begin = 0
        for layer in self._layers:
            layer(x, out[:, begin : begin + layer.out_features])
            begin += layer.out_features
        return out

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self._layers)


class DequantizingLinear(Linear):
    """Weights that are turned into floats in every call, a piece at a time: for machines without a C compiler."""

    def __init__(self, sources: Sequence[Source], bias: Tensor | None) -> None:
        """Keep the integers of all sources, a byte each."""
        self.in_features = sources[0].columns
        self.out_features = sum(source.rows for source in sources)
        self._pieces = [piece for source in sources for piece in _pieces(source)]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        out = x.new_empty(x.shape[0], self.out_features)
        begin = 0
        for piece in self._pieces:
            end = begin + piece.out_features
            out[:, begin:end] = x @ piece.dequantized().to(x.dtype).T
            begin = end
        return out if self._bias is None else out.add_(self._bias)

    @property
    def weight_bytes(self) -> int:
        tensors = [t for piece in self._pieces for t in (piece.values, piece.scale, piece.offset)]
        return sum(tensor.nbytes for tensor in (*tensors, self._bias) if tensor is not None)

    @staticmethod
    def planned_bytes(source: Source, *, bias: bool) -> int:
        """What :attr:`weight_bytes` counts for a source."""
        form = source.format
        segments = -(-source.columns // form.segment)
        scales = 4 * (2 if form.offsets else 1)
        return source.rows * (segments * (form.segment + scales) + (4 if bias else 0))


def pack(sources: Sequence[Source], biases: Sequence[Tensor | None], *, act_group: int | None, act_bits: int) -> Linear:
    """One layer with the outputs of all sources side by side.

    Matrices are converted and packed a piece at a time. Neighbours of one format become one matrix.
    """
    if build.library() is None:
        return DequantizingLinear(sources, _joined(list(zip(sources, biases, strict=True))))

    def make(form: Format, columns: int, rows: int, bias: Tensor | None) -> PackedQuantizedLinear:
        return PackedQuantizedLinear(
            columns,
            rows,
            **asdict(form),
            act_group=_act_group(form, columns, act_group),
            act_bits=act_bits,
            bias=bias,
        )

    return pack_with(make, sources, biases)


def pack_with(
    make: Callable[[Format, int, int, Tensor | None], PackedLayer],
    sources: Sequence[Source],
    biases: Sequence[Tensor | None],
) -> Linear:
    """What :func:`pack` does, with layers that ``make(format, columns, rows, bias)`` makes, to be filled."""
    layers: list[PackedLayer] = []
    for form, run in groupby(zip(sources, biases, strict=True), key=lambda pair: pair[0].format):
        parts = list(run)
        layer = make(form, parts[0][0].columns, sum(source.rows for source, _ in parts), _joined(parts))
        first = 0
        for source, _ in parts:
            for piece in _pieces(source):
                try:
                    layer.put(piece, first)
                except OverflowError as error:
                    raise ModelLoadError(
                        f"the weights of {source.name} cannot be quantised: {error}; the file is damaged, or list the "
                        "layer under plugins.quantization.exclude"
                    ) from error
                first += piece.out_features
        layers.append(layer)
    return layers[0] if len(layers) == 1 else JoinedLinear(layers)


def packed_bytes(sources: Sequence[Source], *, bias: bool, act_group: int | None) -> int:
    """The ``weight_bytes`` of what :func:`pack` makes of sources that have a bias or have none; nothing is read."""
    if build.library() is None:
        return sum(DequantizingLinear.planned_bytes(source, bias=bias) for source in sources)

    def planned(form: Format, columns: int, rows: int) -> int:
        group = _act_group(form, columns, act_group)
        return PackedQuantizedLinear.planned_bytes(columns, rows, **form.size_fields, act_group=group, bias=bias)

    return bytes_with(planned, sources)


def bytes_with(planned: Callable[[Format, int, int], int], sources: Sequence[Source]) -> int:
    """What :func:`packed_bytes` does, with layers of ``planned(format, columns, rows)`` bytes."""
    runs = ((form, list(run)) for form, run in groupby(sources, key=lambda source: source.format))
    return sum(planned(form, parts[0].columns, sum(part.rows for part in parts)) for form, parts in runs)


def _act_group(form: Format, columns: int, wanted: int | None) -> int | None:
    """Values of an activation that share a scale: a multiple of the weights' group, unless that is the whole row."""
    if wanted is None or (form.segment >= columns and not form.offsets):
        return wanted
    return max(wanted, form.segment)


def _pieces(source: Source) -> Iterator[QuantizedMatrix]:
    step = max(1, _CHUNK // source.columns)
    for begin in range(0, source.rows, step):
        end = min(begin + step, source.rows)
        piece = source.read(begin, end)
        _check_finite(source, piece, begin)
        yield piece
        if source.release is not None:
            source.release(begin, end)


def _check_finite(source: Source, piece: QuantizedMatrix, first: int) -> None:
    """Refuse a piece, whose first row is row ``first``, with weights that are no numbers: then its scales are none."""
    for part in (piece.scale, piece.offset):
        if part is not None and not part.isfinite().all():
            row = first + int((~part.isfinite()).any(1).nonzero()[0])
            raise ModelLoadError(
                f"{source.name}.weight holds NaN or infinity, first in row {row}: the file is damaged, or was "
                "written after the training had diverged; get another copy of it"
            )


def _joined(parts: Sequence[tuple[Source, Tensor | None]]) -> Tensor | None:
    if all(bias is None for _, bias in parts):
        return None
    return torch.cat([torch.zeros(source.rows) if bias is None else bias.float() for source, bias in parts])
