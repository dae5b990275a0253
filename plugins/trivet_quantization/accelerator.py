"""Layers on CUDA and ROCm: the products are torchao's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trivet.errors import PluginError
from trivet_torch.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor


class TorchaoLinear(Linear):
    """Weights that torchao has converted."""

    def __init__(self, weight: Tensor, bias: Tensor | None, config: Any) -> None:
        """Convert ``weight`` ``[out, in]`` as torchao's ``config`` says; weight and bias are where and in what type the
        layer computes."""
        self.out_features, self.in_features = weight.shape
        with torch.device("meta"):
            self._module = torch.nn.Linear(self.in_features, self.out_features, bias=bias is not None)
        self._module.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self._module.bias = torch.nn.Parameter(bias, requires_grad=False)
        _torchao().quantize_(self._module, config)
        self._bits = _bits_of(config)

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]``."""
        result: Tensor = self._module(x)
        return result

    @property
    def weight_bytes(self) -> int:
        bias = 0 if self._module.bias is None else self._module.bias.nbytes
        return self.in_features * self.out_features * self._bits // 8 + bias

    @staticmethod
    def planned_bytes(out_features: int, in_features: int, config: Any, *, bias: bool, dtype: torch.dtype) -> int:
        """What :attr:`weight_bytes` is of a layer of this size."""
        return in_features * out_features * _bits_of(config) // 8 + (out_features * dtype.itemsize if bias else 0)


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
    """One layer with the outputs of all ``weights`` ``[out_i, in]`` side by side."""
    if _bits_of(config) == 4 and dtype != torch.bfloat16:
        raise PluginError(
            f"quantization 'int4' computes in bfloat16 on an accelerator and the model's dtype is "
            f"{str(dtype).removeprefix('torch.')}: set dtype to bfloat16, or use int8"
        )
    weight = torch.cat([part.to(device, dtype) for part in weights])
    bias = None
    if any(part is not None for part in biases):
        given = zip(weights, biases, strict=True)
        parts = [torch.zeros(len(matrix)) if part is None else part for matrix, part in given]
        bias = torch.cat([part.to(device, dtype) for part in parts])
    return TorchaoLinear(weight, bias, config)


def _bits_of(config: Any) -> int:
    return 4 if type(config).__name__.startswith("Int4") else 8


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise PluginError(
            f"quantised weights on an accelerator need torchao, which cannot be imported ({error}): "
            "pip install 'trivet[torchao]', or leave plugins.quantization out"
        ) from error
