"""The kernels that are measured: shapes, data and what each provider calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from _kernel_timing import DTYPES, Case, Run, copies, turns

from trivet_kernels.ops import Ops, ops_for
from trivet_kernels.reference import sampling as reference_sampling
from trivet_kernels.reference.ops import ReferenceOps
from trivet_kernels.sampling import argmax

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.cpu.linear import QuantizedLinear


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a decoder."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


#: Qwen2.5 of 0.5 and 7 billion parameters
MODELS = (Model("0.5B", 896, 4864, 14, 2, 64, 151_936), Model("7B", 3584, 18_944, 28, 4, 128, 152_064))
#: values of a weight or an activation that share a scale when they have few bits
_GROUP = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how much is measured. Data that comes from memory in a real step takes turns over ``spread`` bytes."""

    device: torch.device
    quick: bool
    spread: int

    @property
    def models(self) -> tuple[Model, ...]:
        """The large one takes long to set up."""
        return MODELS[:1] if self.quick else MODELS

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random numbers on the device, the same in every run."""
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)


def operations(setting: Setting) -> Iterator[Case]:
    """Norms, rotary embeddings and gated activations; their data is in a cache, where the step left it."""
    providers: list[Ops] = [ops_for(setting.device)]
    if not isinstance(providers[0], ReferenceOps):
        providers.append(ReferenceOps())
    for model in setting.models:
        for dtype in DTYPES.values():
            for rows in (1, 32) if setting.quick else (1, 32, 512):
                for kernel, arithmetic, num_bytes, bind in _operations_of(setting, model, rows, dtype):
                    shape = f"{model.name} {rows} rows {_short(dtype)}"
                    for ops in providers:
                        yield Case(kernel, shape, ops.name, "float32", num_bytes, arithmetic, bind(ops))


def _operations_of(
    setting: Setting, model: Model, rows: int, dtype: torch.dtype
) -> Iterator[tuple[str, int, int, Callable[[Ops], Run]]]:
    x = setting.random(rows, model.hidden, dtype=dtype)
    residual, out, weight = x.clone(), torch.empty_like(x), torch.ones(model.hidden, device=setting.device)
    residual.zero_()
    gated = setting.random(rows, 2 * model.intermediate, dtype=dtype)
    half = gated.new_empty(rows, model.intermediate)
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    fused = setting.random(rows, queries + 2 * keys, dtype=dtype)
    query = fused[:, :queries].view(rows, model.heads, model.head_dim)
    key = fused[:, queries : queries + keys].view(rows, model.kv_heads, model.head_dim)
    positions = torch.arange(rows, device=setting.device)
    table = torch.cat((torch.ones(rows, model.head_dim // 2), torch.zeros(rows, model.head_dim // 2)), 1)
    table = table.to(setting.device)
    # Operations are counted as multiplications and additions of the formula; exponentials as one.
    yield "rms_norm", 4 * x.numel(), 2 * x.nbytes, lambda ops: lambda _: ops.rms_norm(x, weight, 1e-6, out)
    yield (
        "add_rms_norm",
        5 * x.numel(),
        4 * x.nbytes,
        lambda ops: lambda _: ops.add_rms_norm(x, residual, weight, 1e-6, out),
    )
    turned = (queries + keys) * rows
    yield (
        "rotary",
        3 * turned,
        2 * turned * dtype.itemsize,
        lambda ops: lambda _: ops.rotary(query, key, positions, table),
    )
    yield "silu_and_mul", 4 * half.numel(), 3 * half.nbytes, lambda ops: lambda _: ops.silu_and_mul(gated, half)
    yield "gelu_and_mul", 8 * half.numel(), 3 * half.nbytes, lambda ops: lambda _: ops.gelu_and_mul(gated, half)


def products(setting: Setting) -> Iterator[Case]:
    """Matrix products of a layer and of the LM head, with weights that come from memory."""
    for model in setting.models:
        width = (model.heads + 2 * model.kv_heads) * model.head_dim
        matrices = {
            "qkv": (model.hidden, width),
            "gate_up": (model.hidden, 2 * model.intermediate),
            "down": (model.intermediate, model.hidden),
            "lm_head": (model.hidden, model.vocabulary),
        }
        for name, (inputs, outputs) in matrices.items():
            if (setting.quick and name != "gate_up") or (name == "lm_head" and model is not MODELS[0]):
                continue
            for kind, arithmetic, num_bytes, layers in _layers(setting, inputs, outputs):
                for rows in (1, 64) if setting.quick else (1, 8, 64) if name == "lm_head" else (1, 8, 64, 512):
                    dtype = DTYPES.get(arithmetic, torch.bfloat16)
                    x = setting.random(rows, inputs, dtype=dtype)
                    moved = num_bytes + x.nbytes + rows * outputs * dtype.itemsize
                    for provider, made in layers.items():
                        run = turns([_call(layer, x) for layer in made])
                        shape = f"{model.name} {name} {inputs}x{outputs} {rows} rows {kind}"
                        yield Case("linear", shape, provider, arithmetic, moved, 2 * rows * inputs * outputs, run)


def _call(layer: Callable[[Tensor], Tensor], x: Tensor) -> Run:
    return lambda _: layer(x)


def _layers(
    setting: Setting, inputs: int, outputs: int
) -> Iterator[tuple[str, str, int, dict[str, list[Callable[[Tensor], Tensor]]]]]:
    """What the weights are stored as, the arithmetic, their bytes, and by provider the same product several times."""
    from trivet_torch.linear import PlainLinear, can_pack, make_linear

    for name, dtype in DTYPES.items():
        weight = setting.random(outputs, inputs, dtype=dtype)
        count = copies(weight.nbytes, setting.spread)
        layers: dict[str, list[Callable[[Tensor], Tensor]]] = {
            "plain": [PlainLinear(weight.clone()) for _ in range(count)]
        }
        if can_pack(dtype, setting.device):
            layers["packed"] = [make_linear([weight], dtype=dtype, device=setting.device) for _ in range(count)]
        yield _short(dtype), name, weight.nbytes, layers
    if setting.device.type == "cpu":
        for bits in (8, 4):
            if made := _quantized(inputs, outputs, bits, setting.spread):
                yield f"int{bits}", "int8", made[0].weight_bytes, {"native": [*made]}


def _quantized(inputs: int, outputs: int, bits: int, spread: int) -> list[QuantizedLinear]:
    """Random weights in groups of 32 with a scale each, and with four bits an offset; none without a compiler."""
    from trivet_kernels.cpu.build import library
    from trivet_kernels.cpu.linear import QuantizedLinear
    from trivet_kernels.reference.quantized import QuantizedMatrix

    if library() is None:
        return []
    groups = -(-inputs // _GROUP)
    values = torch.randint(0, 1 << bits, (outputs, groups * _GROUP), dtype=torch.uint8)
    scale = torch.full((outputs, groups), 0.01)
    offset = -8 * scale if bits == 4 else None
    matrix = QuantizedMatrix(values, scale, offset, inputs, _GROUP, bits, 0 if bits == 4 else 128)
    first = QuantizedLinear.of(matrix, act_group=_GROUP)
    count = copies(first.weight_bytes, spread)
    return [first, *(QuantizedLinear.of(matrix, act_group=_GROUP) for _ in range(count - 1))]


def likeliest(setting: Setting) -> Iterator[Case]:
    """Greedy choice among the logits of a step."""
    model = MODELS[0]
    for dtype in DTYPES.values():
        for rows in (1, 8) if setting.quick else (1, 32, 64):
            logits = setting.random(rows, model.vocabulary, dtype=dtype)
            shape = f"{rows} rows of {model.vocabulary} {_short(dtype)}"
            providers = {"chosen": argmax, "reference": reference_sampling.argmax}
            for provider, function in providers.items():
                run = partial(_argmax, function, logits)
                yield Case("argmax", shape, provider, "float32", logits.nbytes, logits.numel(), run)


def _argmax(function: Callable[[Tensor, int], object], logits: Tensor, _: int) -> object:
    return function(logits, logits.shape[1])


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
