"""Layers on CUDA and ROCm that a Triton kernel multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from trivet.errors import PluginError
from trivet_quantization.layers import PackedLayer, bytes_with, pack_with

try:
    from trivet_kernels.triton.compat import runs_here
    from trivet_kernels.triton.quantized import QuantizedLinear
except ImportError as error:
    raise PluginError(
        f"quantised weights on a GPU need Triton, which cannot be imported ({error}): pip install 'trivet[triton]', or "
        "leave plugins.quantization out"
    ) from error

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_quantization.formats import Format, Source
    from trivet_torch.linear import Linear


class TritonLinear(QuantizedLinear, PackedLayer):
    """Packed weights of one format, on a GPU."""

    capturable = True


def pack(sources: Sequence[Source], biases: Sequence[Tensor | None], *, device: str) -> Linear:
    """One layer with the outputs of all sources side by side, on ``device``.

    Raises:
        PluginError: The kernels do not run there.
    """
    if not runs_here(torch.device(device)):
        raise PluginError(
            f"quantised weights are multiplied on CPUs, CUDA and ROCm devices, and the device is {device}: leave "
            "plugins.quantization out"
        )

    def make(form: Format, columns: int, rows: int, bias: Tensor | None) -> TritonLinear:
        return TritonLinear(columns, rows, **asdict(form), bias=bias, device=device)

    return pack_with(make, sources, biases)


def packed_bytes(sources: Sequence[Source], *, bias: bool) -> int:
    """The ``weight_bytes`` of what :func:`pack` makes of sources that have a bias or have none; nothing is read."""

    def planned(form: Format, columns: int, rows: int) -> int:
        return TritonLinear.planned_bytes(columns, rows, **form.size_fields, bias=bias)

    return bytes_with(planned, sources)
