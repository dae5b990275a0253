"""What the providers share: which layers they take, and reading their weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trivet.errors import ModelLoadError, PluginError
from trivet.gguf import GGMLType
from trivet.model_source import find_model
from trivet.roles import Quantization, StoredLinear
from trivet_quantization.blocks import FORMATS, read_blocks
from trivet_quantization.formats import Format, Source, round_to
from trivet_quantization.layers import pack, packed_bytes
from trivet_quantization.names import is_head, matches, matrices, warn_of_patterns
from trivet_torch.weights.gguf_dequant import dequantize_into

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.context import WorkerContext
    from trivet_quantization.options import GgufOptions, Int4Options, Int8Options
    from trivet_torch.linear import Linear

_FLOATING = frozenset({"float32", "bfloat16", "float16"})
# Sums of products of bytes over a row must fit into 32 bits.
_MAX_COLUMNS = 65536


class PackingQuantization(Quantization):
    """Packs weights for the native CPU kernels or for those of a GPU, or has torchao convert them."""

    #: options that torchao has no use for
    _unused_by_torchao: ClassVar[frozenset[str]] = frozenset()
    #: what is told where layers are stored in another way than :meth:`_reads` knows
    _only_reads: ClassVar[str] = "which cannot be converted: name files of the model in bfloat16"

    def __init__(self, context: WorkerContext, options: Int8Options | Int4Options | GgufOptions) -> None:
        """Keep the options, and warn of patterns that fit no layer of the model.

        Raises:
            PluginError: One of them was set that has no effect on the device.
            ModelLoadError: The model has layers, and none of them would be quantised.
        """
        self.options = options
        self._config = context.config
        self._device = context.device
        self._accelerated = context.device.partition(":")[0] != "cpu"
        self._act_group = options.activation_group
        self._act_bits = 16 if options.activations == "int16" else 8
        self._torchao = self._accelerated and getattr(options, "backend", "") == "torchao"
        self._refuse_unused()
        self._check_layers()

    def _refuse_unused(self) -> None:
        if self._torchao:
            unused, place = self._unused_by_torchao, "torchao"
            remedy = "leave it out, or set plugins.quantization.backend to triton"
        elif self._accelerated:
            unused, place = frozenset({"activations", "activation_group"}), self._device
            remedy = "leave it out; activations are not rounded there"
        else:
            unused, place, remedy = frozenset({"backend"}), "a CPU", "leave it out"
        for name in sorted(unused & self.options.model_fields_set):
            value = getattr(self.options, name)
            raise PluginError(f"plugins.quantization.{name} has no effect on {place}: {remedy} (it is {value!r})")

    def _check_layers(self) -> None:
        layers, model = matrices(self._config), self._config.model
        if layers and not any(self.accepts(name, shape, stored) for name, (shape, stored) in layers.items()):
            raise ModelLoadError(
                f"{model}: plugins.quantization would change nothing: {self._why_none(layers)}, or leave "
                "plugins.quantization out"
            )
        for field in ("exclude", "eight_bits"):
            if layers and field in self.options.model_fields_set:
                warn_of_patterns(field, getattr(self.options, field), list(layers), model)

    def _why_none(self, layers: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
        """Why none of the layers is accepted, and what to change."""
        stored = sorted({stored for _, stored in layers.values()})
        if any(map(self._reads, stored)):
            return (
                f"its options leave out all {len(layers)} layers (exclude is {list(self.options.exclude)}): change them"
            )
        return f"its layers are stored as {' and '.join(stored)}, {self._only_reads}"

    def accepts(self, name: str, shape: tuple[int, ...], stored: str) -> bool:
        name = name.removesuffix(".weight")
        if len(shape) != 2 or shape[1] > _MAX_COLUMNS or not self._reads(stored):
            return False
        if is_head(name) and self.options.lm_head is False:
            return False
        return not matches(name, self.options.exclude)

    def linear(self, parts: Sequence[StoredLinear]) -> Linear:
        biases = [part.tensors.get("bias") for part in parts]
        if self._torchao:
            return self._convert(parts, biases)
        sources = [self._source(part) for part in parts]
        if self._accelerated:
            from trivet_quantization import accelerator

            return accelerator.pack(sources, biases, device=self._device)
        return pack(sources, biases, act_group=self._act_group, act_bits=self._act_bits)

    def planned_bytes(self, parts: Sequence[StoredLinear], *, bias: bool) -> int:
        if self._torchao:
            from trivet_quantization.torchao import TorchaoLinear

            rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
            config = self._torchao_config(parts[0])
            return TorchaoLinear.planned_bytes(rows, columns, config, bias=bias, dtype=self._dtype())
        sources = [self._source(part) for part in parts]
        if self._accelerated:
            from trivet_quantization import accelerator

            return accelerator.packed_bytes(sources, bias=bias)
        return packed_bytes(sources, bias=bias, act_group=self._act_group)

    def _reads(self, stored: str) -> bool:
        """Whether weights stored like that can be converted."""
        return stored in _FLOATING or blocks_of(stored) is not None

    @abstractmethod
    def _source(self, part: StoredLinear) -> Source:
        """The part in the format that is meant for it."""

    def _torchao_config(self, part: StoredLinear) -> Any:
        """What torchao makes of the part, for providers that have the option ``backend``."""
        raise NotImplementedError

    def _convert(self, parts: Sequence[StoredLinear], biases: Sequence[Tensor | None]) -> Linear:
        from trivet_quantization.torchao import convert

        weights = [floats(part, 0, part.shape[0]) for part in parts]
        # The parts of a fused layer are alike: their formats differ by what a layer is for.
        return convert(weights, biases, self._torchao_config(parts[0]), device=self._device, dtype=self._dtype())

    def _dtype(self) -> torch.dtype:
        """The model's, in which torchao computes."""
        from trivet_torch.dtypes import resolve_dtype

        found = find_model(self._config.model, self._config.revision)
        return resolve_dtype(self._config.dtype, self._config.model if found is None else str(found.path), self._device)


def blocks_of(stored: str) -> GGMLType | None:
    """The type of GGUF's blocks, None for anything else and for types that are not supported."""
    kind = GGMLType.__members__.get(stored)
    return kind if kind in FORMATS else None


def as_stored(part: StoredLinear, kind: GGMLType) -> Source:
    """The part's blocks of type ``kind`` as they are."""
    return Source(
        part.name,
        FORMATS[kind],
        *part.shape,
        lambda begin, end: read_blocks(kind, torch.tensor(part.tensors["weight"][begin:end])),
        part.release,
    )


def rounded(part: StoredLinear, form: Format) -> Source:
    """The part rounded to ``form``, through float32."""
    return Source(
        part.name, form, *part.shape, lambda begin, end: round_to(form, floats(part, begin, end)), part.release
    )


def floats(part: StoredLinear, begin: int, end: int) -> Tensor:
    """Rows ``[begin, end)`` of a part in float32."""
    weight = part.tensors["weight"]
    if part.stored in _FLOATING:
        rows: Tensor = weight[begin:end].float()
        return rows
    out = torch.empty(end - begin, part.shape[1])
    dequantize_into(out, weight[begin:end].reshape(-1), GGMLType[part.stored])
    return out
