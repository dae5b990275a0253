"""Building the layers of a decoder from stored weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trivet_kernels import moe
from trivet_native.fused import Workspace, fused_block
from trivet_native.layers import SLICE, Block, BlockWeights, FeedForward, GatedMLP, Scratch, gate_with
from trivet_native.moe import ClampedSwiGLU, Experts
from trivet_torch.embedding import DeviceEmbedding, FileEmbedding
from trivet_torch.linear import PlainLinear, make_linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trivet.roles import Quantization, StoredLinear
    from trivet_kernels.ops import Ops
    from trivet_native.spec import DecoderSpec, ExpertsSpec, LayerSpec
    from trivet_torch.embedding import Embedding
    from trivet_torch.linear import Linear
    from trivet_torch.weights.stored import StoredWeights

logger = logging.getLogger("trivet.model")

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head"
SCORE = "score.weight"
_MAX_NAMES = 6


class Loader:
    """Takes tensors out of stored weights, checks their shapes, and turns matrices into layers."""

    def __init__(
        self,
        weights: StoredWeights,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None,
        ops: Ops,
        tables: Sequence[Tensor],
        max_tokens: int,
        plain: bool = False,
    ) -> None:
        """``tables``: of rotary embeddings, as :attr:`DecoderSpec.ropes`. ``max_tokens``: of a step. ``plain``: only
        operations that a compiler can look into."""
        self._weights, self._spec, self._dtype, self._device = weights, spec, dtype, device
        self._quantization, self._ops, self._tables, self._plain = quantization, ops, tables, plain
        #: what layers compute in, where that is kept
        # On accelerators torch keeps freed memory at hand, and what a recorded step (CUDA graph) takes has to stay.
        self.scratch = Scratch(dtype, device) if device.type == "cpu" and not plain else None
        if self.scratch is not None:
            self._reserve(self.scratch, max_tokens)
        self._workspace = None if self.scratch is None else Workspace(self.scratch, spec)
        self._embedding: DeviceEmbedding | None = None
        self._gate: Callable[[Tensor, Tensor | None], Tensor] = gate_with(spec.activation, ops)

    def embedding(self) -> Embedding:
        """The embedding matrix, on an accelerator in its memory, else in its file."""
        weights, spec = self._weights, self._spec
        weights.expect(EMBEDDING, (spec.vocab_size, spec.hidden_size))
        if self._device.type == "cpu":
            return FileEmbedding(weights, EMBEDDING, dtype=self._dtype, scale=spec.embed_scale)
        matrix = weights.tensor(EMBEDDING, self._dtype).to(self._device)
        self._embedding = DeviceEmbedding(matrix, scale=spec.embed_scale)
        return self._embedding

    def head(self) -> Linear:
        """The output projection; the embedding matrix where the model has none of its own."""
        spec = self._spec
        is_tied = spec.tied and f"{HEAD}.weight" not in self._weights.names
        if is_tied and self._embedding is not None and self._quantization is None:
            return PlainLinear(self._embedding.weight)
        name = EMBEDDING.removesuffix(".weight") if is_tied else HEAD
        return self._linear([name], [spec.vocab_size], spec.hidden_size, named=HEAD)

    def score_head(self) -> Tensor:
        """The matrix ``[num_labels, hidden_size]`` of a model that classifies sequences, in float32."""
        weights = self._weights
        weights.expect(SCORE, (weights.shape(SCORE)[0], self._spec.hidden_size))
        return weights.tensor(SCORE, torch.float32).clone().to(self._device)

    def final_norm(self) -> Tensor:
        """The weights of the norm before the head."""
        return self._norm("model.norm", self._spec.hidden_size)

    def block(self, index: int) -> Block:
        """Layer ``index``."""
        spec, layer = self._spec, self._spec.layers[index]
        path = f"model.layers.{index}"
        attention, norms = f"{path}.self_attn", spec.norms
        sizes = [spec.query_size, spec.kv_size, spec.kv_size]
        names = [f"{attention}.{name}" for name in spec.qkv]
        weights = BlockWeights(
            attention_norm=self._norm(f"{path}.{norms['attention']}", spec.hidden_size),
            qkv=self._linear(names, _shares(sizes, len(names)), spec.hidden_size, bias=spec.qkv_bias),
            out=self._linear([f"{attention}.o_proj"], [spec.hidden_size], spec.query_size, bias=spec.out_bias),
            mlp_norm=self._norm(f"{path}.{norms['mlp']}", spec.hidden_size),
            mlp=self._feed_forward(path, layer),
        )
        if spec.output_norms:
            weights.attention_output_norm = self._norm(f"{path}.{norms['attention_output']}", spec.hidden_size)
            weights.mlp_output_norm = self._norm(f"{path}.{norms['mlp_output']}", spec.hidden_size)
        if spec.query_key_norms:
            weights.query_norm = self._norm(f"{attention}.q_norm", spec.head_dim)
            weights.key_norm = self._norm(f"{attention}.k_norm", spec.head_dim)
        if spec.sinks:
            weights.sinks = self._vector(f"{attention}.sinks", spec.num_heads)
        table, is_sliced = self._tables[layer.rope], layer.experts is None
        native = None
        if self._workspace is not None:
            native = fused_block(spec, weights, table, self._ops, self._dtype, self._workspace)
        return Block(spec, weights, table, self._ops, self.scratch, sliced=is_sliced, native=native)

    def finish(self) -> None:
        """Say so if the file has more than the model takes."""
        unused = self._weights.unused()
        if unused:
            shown = ", ".join(unused[:_MAX_NAMES])
            more = f" and {len(unused) - _MAX_NAMES} more" if len(unused) > _MAX_NAMES else ""
            logger.warning("%s: the model has no use for the tensors %s%s", self._weights.location, shown, more)

    # ------------------------------------------------------------------ parts

    def _reserve(self, scratch: Scratch, max_tokens: int) -> None:
        """The memory that steps of up to ``max_tokens`` tokens will use."""
        spec, rows = self._spec, min(max_tokens, SLICE)
        if any(layer.experts is not None for layer in spec.layers):
            scratch.reserve("normed", max_tokens, spec.hidden_size)
        else:
            scratch.reserve("normed", rows, spec.hidden_size)
            scratch.reserve("projected", rows, spec.hidden_size)
            scratch.reserve("gated", rows, spec.intermediate_size)
        scratch.reserve("qkv", max_tokens, spec.query_size + 2 * spec.kv_size)
        scratch.reserve("delta", max_tokens, spec.hidden_size)

    def _feed_forward(self, path: str, layer: LayerSpec) -> FeedForward:
        spec = self._spec
        if layer.experts is None:
            return self._mlp(f"{path}.mlp", spec.gate_up, "down_proj", spec.intermediate_size, bias=spec.mlp_bias)
        return self._experts(path, layer.experts)

    def _mlp(
        self,
        path: str,
        gate_up: Sequence[str],
        down: str,
        size: int,
        *,
        bias: bool = False,
        gate: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> GatedMLP:
        hidden = self._spec.hidden_size
        names = [f"{path}.{name}" for name in gate_up]
        return GatedMLP(
            self._linear(names, _shares([size, size], len(names)), hidden, bias=bias),
            self._linear([f"{path}.{down}"], [hidden], size, bias=bias),
            gate or self._gate,
            self.scratch,
            fused=None if gate is not None or self._plain else self._spec.activation,
        )

    def _experts(self, path: str, experts: ExpertsSpec) -> Experts:
        hidden = self._spec.hidden_size
        shared = shared_gate = None
        if experts.shared_size:
            shared = self._mlp(f"{path}.mlp.shared_expert", experts.gate_up, experts.down, experts.shared_size)
            shared_gate = self._linear([f"{path}.mlp.shared_expert_gate"], [1], hidden, quantise=False)
        return Experts(
            experts,
            self._linear([f"{path}.{experts.router}"], [experts.count], hidden, bias=experts.bias, quantise=False),
            self._stacked(path, experts) or self._separate(path, experts),
            shared,
            shared_gate,
        )

    def _separate(self, path: str, experts: ExpertsSpec) -> list[FeedForward]:
        """Every expert as a network of its own."""
        gate = None if experts.clamped is None else ClampedSwiGLU(*experts.clamped)
        return [
            self._mlp(
                f"{path}.{experts.expert.format(index)}",
                experts.gate_up,
                experts.down,
                experts.intermediate_size,
                bias=experts.bias,
                gate=gate,
            )
            for index in range(experts.count)
        ]

    def _stacked(self, path: str, experts: ExpertsSpec) -> moe.StackedExperts | None:
        """All experts in one tensor, where they are multiplied at once; None where that is not done."""
        size, hidden = experts.intermediate_size, self._spec.hidden_size
        paths = [f"{path}.{experts.expert.format(index)}" for index in range(experts.count)]
        gate_up = [[f"{expert}.{name}" for name in experts.gate_up] for expert in paths]
        down = [[f"{expert}.{experts.down}"] for expert in paths]
        if not moe.serves(self._device) or any(self._taker(names, None) is not None for names in (*gate_up, *down)):
            return None
        first, first_bias = self._stack(gate_up, _shares([size, size], len(experts.gate_up)), hidden, bias=experts.bias)
        second, second_bias = self._stack(down, [hidden], size, bias=experts.bias)
        slope, limit = experts.clamped or (0.0, 0.0)
        activation = self._spec.activation if experts.clamped is None else "clamped"
        return moe.StackedExperts(first, second, activation, first_bias, second_bias, slope, limit)

    def _stack(
        self, names: Sequence[Sequence[str]], sizes: Sequence[int], width: int, *, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Matrices ``[len(names), sum(sizes), width]`` of layers of one kind, and their biases ``[len(names),
        sum(sizes)]``; one layer at a time is there twice."""
        rows = sum(sizes)
        weight = torch.empty(len(names), rows, width, dtype=self._dtype, device=self._device)
        biases = torch.empty(len(names), rows, dtype=self._dtype, device=self._device) if bias else None
        for index, parts in enumerate(names):
            made = self._linear(parts, sizes, width, bias=bias)
            assert isinstance(made, PlainLinear), "experts are stacked on accelerators, without quantization"
            weight[index] = made.weight
            if biases is not None and made.bias is not None:
                biases[index] = made.bias
        return weight, biases

    def _linear(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        width: int,
        *,
        bias: bool = False,
        quantise: bool = True,
        named: str | None = None,
    ) -> Linear:
        """Matrices ``names`` of ``sizes`` rows each as one layer, which the quantization gets to see as ``named``."""
        self._expect(names, sizes, width, bias=bias)
        return self._make(names, self._taker(names, named) if quantise else None, named, bias=bias)

    def _make(
        self, names: Sequence[str], quantization: Quantization | None, named: str | None, *, bias: bool
    ) -> Linear:
        """The layer of :meth:`_linear`, whose matrices have been looked at: by ``quantization`` if that takes them."""
        weights = self._weights
        if quantization is not None:
            made: Linear = quantization.linear([self._stored(name, named or name, bias=bias) for name in names])
        else:
            biases = [weights.tensor(f"{name}.bias", self._dtype) for name in names] if bias else None
            if self._plain:
                matrices = [weights.tensor(f"{name}.weight", self._dtype) for name in names]
                made = PlainLinear(_joined(matrices, self._device), _joined(biases, self._device) if biases else None)
            else:
                parts = [weights.matrix(f"{name}.weight", self._dtype) for name in names]
                made = make_linear(parts, biases, dtype=self._dtype, device=self._device)
        for name in names:
            weights.release(f"{name}.weight")
        return made

    def _expect(self, names: Sequence[str], sizes: Sequence[int], width: int, *, bias: bool) -> None:
        """Check the shapes of a layer's tensors."""
        for name, size in zip(names, sizes, strict=True):
            self._weights.expect(f"{name}.weight", (size, width))
            if bias:
                self._weights.expect(f"{name}.bias", (size,))

    def _taker(self, names: Sequence[str], named: str | None) -> Quantization | None:
        """The quantization, if it takes all matrices of a layer."""
        quantization, weights = self._quantization, self._weights
        if quantization is None:
            return None
        shown = [(named or name, f"{name}.weight") for name in names]
        accepted = all(quantization.accepts(name, weights.shape(key), weights.stored(key)) for name, key in shown)
        return quantization if accepted else None

    def _stored(self, name: str, named: str, *, bias: bool) -> StoredLinear:
        part = self._weights.linear(name)
        kept = {suffix: tensor for suffix, tensor in part.tensors.items() if bias or suffix != "bias"}
        matrix = self._weights.matrix(f"{name}.weight", self._dtype)
        return dataclasses.replace(part, name=named, tensors=kept, release=matrix.release)

    def _norm(self, path: str, size: int) -> Tensor:
        weight = self._vector(f"{path}.weight", size)
        return weight + self._spec.norm_offset if self._spec.norm_offset else weight

    def _vector(self, name: str, size: int) -> Tensor:
        """A tensor ``[size]`` in float32, in memory of its own."""
        self._weights.expect(name, (size,))
        return self._weights.tensor(name, torch.float32).clone().to(self._device)


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """All parts in one tensor of its own memory."""
    return torch.cat([part.to(device) for part in parts])


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """Rows of the matrices that hold parts of ``sizes``: one each, or all in one."""
    return [sum(sizes)] if count == 1 else list(sizes)
