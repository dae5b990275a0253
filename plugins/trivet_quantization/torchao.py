"""Layers on CUDA and ROCm that torchao has converted."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from trivet.errors import PluginError
from trivet_torch.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

# torchao multiplies matrices of other sizes on the CPU.
_MULTIPLE = 8
# What a row of its four bits is filled up to.
_FOUR_BIT_COLUMNS = 1024
_SCALE_BYTES = 4


class TorchaoLinear(Linear):
    """Weights that torchao has converted."""

    def __init__(self, weight: Tensor, bias: Tensor | None, config: Any) -> None:
        """Convert ``weight`` ``[out, in]`` as torchao's ``config`` says; weight and bias are where and in what type the
        layer computes."""
        self.out_features, self.in_features = weight.shape
        self._padding = -self.in_features % _MULTIPLE
        more = -self.out_features % _MULTIPLE
        weight = pad(weight, (0, self._padding, 0, more))
        with torch.device("meta"):
            self._module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self._module.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self._module.bias = torch.nn.Parameter(pad(bias, (0, more)), requires_grad=False)
        _torchao().quantize_(self._module, config)
        self._bytes = self.planned_bytes(
            self.out_features, self.in_features, config, bias=bias is not None, dtype=weight.dtype
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        result: Tensor = self._module(pad(x, (0, self._padding)) if self._padding else x)
        return result[:, : self.out_features]

    @property
    def weight_bytes(self) -> int:
        return self._bytes

    @staticmethod
    def planned_bytes(out_features: int, in_features: int, config: Any, *, bias: bool, dtype: torch.dtype) -> int:
        """What :attr:`weight_bytes` is of a layer of this size."""
        out_features = _filled(out_features, _MULTIPLE)
        total = out_features * dtype.itemsize if bias else 0
        if _bits_of(config) == 8:
            # A scale and a zero, of a byte, for each row.
            return total + out_features * (_filled(in_features, _MULTIPLE) + _SCALE_BYTES + 1)
        columns = _filled(in_features, _FOUR_BIT_COLUMNS)
        group: int = config.group_size
        return total + out_features * (columns // 2 + columns // group * 2 * dtype.itemsize)


def eight_bit_config(*, dynamic: bool) -> Any:
    """Weights of eight bits with a scale per row; ``dynamic``: products of integers."""
    module = _torchao()
    if dynamic:
        return module.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    return module.Int8WeightOnlyConfig(set_inductor_config=False)


def four_bit_config(group: int) -> Any:
    """Weights of four bits in groups of ``group`` values, in the layout of torch's own kernel."""
    return _torchao().Int4WeightOnlyConfig(
        group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


def convert(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], config: Any, *, device: str, dtype: torch.dtype
) -> Linear:
    """A layer of torchao's with the outputs of all ``weights`` ``[out_i, in]`` side by side."""
    if _bits_of(config) == 4 and dtype != torch.bfloat16:
        raise PluginError(
            f"torchao's weights of four bits are multiplied in bfloat16 and the model's dtype is "
            f"{str(dtype).removeprefix('torch.')}: set dtype to bfloat16, or plugins.quantization.backend to triton"
        )
    weight = torch.cat([part.to(device, dtype) for part in weights])
    bias = None
    if any(part is not None for part in biases):
        given = zip(weights, biases, strict=True)
        parts = [torch.zeros(len(matrix)) if part is None else part for matrix, part in given]
        bias = torch.cat([part.to(device, dtype) for part in parts])
    return TorchaoLinear(weight, bias, config)


def _filled(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _bits_of(config: Any) -> int:
    return 4 if type(config).__name__.startswith("Int4") else 8


def _torchao() -> Any:
    try:
        with _quiet("torchao", "torch.utils._pytree"):
            return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise PluginError(
            f"plugins.quantization.backend torchao cannot be imported ({error}): pip install 'trivet[torchao]', or "
            "leave backend out"
        ) from error


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Without the warnings of these loggers: torchao's import tells of kernels of its own that are not used here."""
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    try:
        for logger, _ in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)
