"""Weights as quantization providers get them, and what they should come to."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from trivet.roles import StoredLinear

# gguf-py has no quantisation for the K types, only dequantisation: their blocks are made of random bytes.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def context(device: str = "cpu", dtype: str = "float32") -> Any:
    return SimpleNamespace(device=device, config=SimpleNamespace(dtype=dtype, model="fake", revision=None))


def floats(out: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(out, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def stored(weight: Tensor, name: str = "model.layers.0.mlp.up_proj", bias: Tensor | None = None) -> StoredLinear:
    tensors = {"weight": weight} | ({} if bias is None else {"bias": bias})
    return StoredLinear(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."), tensors)


def blocks(kind: str, out: int, columns: int, name: str = "model.layers.0.mlp.up_proj") -> tuple[StoredLinear, Tensor]:
    """A matrix of GGUF blocks, and the weights that they are by gguf-py."""
    ggml = GGMLQuantizationType[kind]
    rng = np.random.default_rng(3)
    if kind in HALVES:
        size, width = {"IQ4_NL": (32, 18)}.get(kind, (256, None))
        width = width or quants.quant_shape_to_byte_shape((256,), ggml)[0]
        raw = rng.integers(0, 256, (out * columns // size, width), dtype=np.uint8)
        for at in HALVES[kind]:
            scale = (rng.random((len(raw), 1)) * 0.002 + 0.0005).astype(np.float16)
            raw[:, at : at + 2] = scale.view(np.uint8)
        raw = raw.reshape(out, -1)
    else:
        raw = quants.quantize(rng.normal(size=(out, columns)).astype(np.float32) * 0.05, ggml)
    part = StoredLinear(name, (out, columns), kind, {"weight": raw})
    return part, torch.from_numpy(quants.dequantize(raw, ggml).astype(np.float32)).view(out, columns)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def tokens(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(9))


def compare_plan(quantization: Any, parts: list[StoredLinear]) -> None:
    """What a layer will take, told without its tensors, is what it takes."""
    bare = [dataclasses.replace(part, tensors={}) for part in parts]
    planned = quantization.planned_bytes(bare, bias="bias" in parts[0].tensors)
    assert planned == quantization.linear(parts).weight_bytes
