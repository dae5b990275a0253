"""The layers of a decoder around its attention: what goes in, and what becomes of what comes out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from trivet_torch.allocator import Pages

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.ops import Ops
    from trivet_native.fused import FusedBlock
    from trivet_native.spec import Activation, DecoderSpec
    from trivet_torch.linear import Linear


class Scratch:
    """Memory for intermediate results, kept over layers and steps: one buffer per use, as long as the longest step
    needed. What is in it is lost with the next call for the same use."""

    __slots__ = ("_buffers", "_device", "_dtype", "_pages")

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, Tensor] = {}
        self._pages: dict[str, Pages] = {}

    def get(self, use: str, rows: int, columns: int) -> Tensor:
        """``[rows, columns]``, contiguous, with whatever was in it."""
        count = rows * columns
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < count:
            self._buffers[use] = buffer = self._new(use, count)
        return buffer[:count].view(rows, columns)

    def reserve(self, use: str, rows: int, columns: int) -> None:
        """Take the memory for ``[rows, columns]``, the largest that is expected, before the first step; on
        a CPU the system hands the pages out when they are first written."""
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < rows * columns:
            self._buffers[use] = self._new(use, rows * columns)

    def _new(self, use: str, count: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.empty(count, dtype=self._dtype, device=self._device)
        self._pages[use] = pages = Pages(count * self._dtype.itemsize)
        return pages.bytes.view(self._dtype)

    def release(self) -> None:
        """Give back, on a CPU, the memory in which results of a long step lie, and lose them."""
        for pages in self._pages.values():
            pages.release()

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


#: rows that a layer computes at once outside of attention, which bounds what their intermediate results take
SLICE = 256


def slices(rows: int) -> Iterator[slice]:
    """Rows ``[0, rows)`` in pieces of at most :data:`SLICE`."""
    return (slice(first, first + SLICE) for first in range(0, rows, SLICE))


def split_heads(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, heads, head_dim]``, keys and values ``[T, kv_heads, head_dim]`` that lie side by side; views."""
    rows, query_size, split = len(qkv), heads * head_dim, (heads + kv_heads) * head_dim
    query = qkv[:, :query_size].view(rows, heads, head_dim)
    key = qkv[:, query_size:split].view(rows, kv_heads, head_dim)
    value = qkv[:, split:].view(rows, kv_heads, head_dim)
    return query, key, value


class FeedForward(Protocol):
    """A feed-forward network: ``[T, hidden_size]`` to ``[T, hidden_size]``."""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def capture_problem(self) -> str | None:
        """What of it cannot be recorded into a CUDA graph, None if all can."""

    @property
    def weight_bytes(self) -> int: ...


def capture_problem(layers: Mapping[str, Linear | None]) -> str | None:
    """The first of ``layers`` whose product cannot be recorded into a CUDA graph, by its name and kind."""
    for name, layer in layers.items():
        if layer is not None and not layer.capturable:
            return f"{name} is a {type(layer).__name__}"
    return None


def gate_with(activation: Activation, ops: Ops) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The function that makes ``[T, N]`` of ``[gate, up]`` ``[T, 2N]``, and puts it into its second argument if that is
    given."""
    if activation == "silu":
        return ops.silu_and_mul
    return functools.partial(ops.gelu_and_mul, approximate=activation == "gelu_tanh")


class GatedMLP:
    """``down(activation(gate(x)) * up(x))``, with gate and up as one matrix."""

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        gate: Callable[[Tensor, Tensor | None], Tensor],
        scratch: Scratch | None,
        *,
        fused: Activation | None = None,
    ) -> None:
        """With ``scratch`` many rows are computed in slices. ``gate`` makes ``[T, N]`` of ``[gate, up]`` ``[T, 2N]``;
        ``fused`` is its activation, if the layer may compute it with the product."""
        self.gate_up, self.down, self.fused = gate_up, down, fused
        self._gate, self._scratch = gate, scratch
        self.capture_problem = capture_problem({"mlp.gate_up": gate_up, "mlp.down": down})

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if self._scratch is None or rows <= SLICE:
            return self._rows(x)
        out = x.new_empty(rows, self.down.out_features)
        for part in slices(rows):
            out[part] = self._rows(x[part])
        return out

    def _rows(self, x: Tensor) -> Tensor:
        out = None if self._scratch is None else self._scratch.get("gated", x.shape[0], self.down.in_features)
        gated = None if self.fused is None else self.gate_up.gated(x, self.fused, out)
        if gated is None:
            gated = self._gate(self.gate_up(x), out)
        return self.down(gated)

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.weight_bytes + self.down.weight_bytes


@dataclass(slots=True)
class BlockWeights:
    """What one layer has; norms are float32. ``sinks`` ``[num_heads]``."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    mlp: FeedForward
    attention_output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def capture_problem(self) -> str | None:
        """What of the layer cannot be recorded into a CUDA graph."""
        return capture_problem({"qkv": self.qkv, "out": self.out}) or self.mlp.capture_problem

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        parts: list[Tensor | None] = [
            self.attention_norm, self.mlp_norm, self.attention_output_norm, self.mlp_output_norm, self.query_norm,
            self.key_norm, self.sinks,
        ]  # fmt: skip
        vectors = sum(part.nbytes for part in parts if part is not None)
        return vectors + self.qkv.weight_bytes + self.out.weight_bytes + self.mlp.weight_bytes


class Block:
    """One layer, in two pieces around its attention. What a sublayer puts out is added to the residual stream by the
    norm that follows it, so it travels beside it (``delta``).

    With scratch memory a long step is computed in slices of :data:`SLICE` tokens, except attention and experts, whose
    products want many rows. What is as long as the step lies in buffers that the layers share: results of a layer are
    lost when the next layer is computed.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: BlockWeights,
        table: Tensor,
        ops: Ops,
        scratch: Scratch | None,
        *,
        sliced: bool = True,
        native: FusedBlock | None = None,
    ) -> None:
        """``table``: of the layer's rotary embeddings. Without ``scratch`` all results are new tensors. ``sliced``:
        whether the feed-forward network may be given a part of the rows. ``native`` computes the same as the operations
        here, if there is one."""
        self.weights = weights
        self._native = native
        self._sliced = sliced
        self._table, self._ops, self._scratch = table, ops, scratch
        self._eps = spec.eps
        self._heads, self._kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._query_size, self._kv_size = spec.query_size, spec.kv_size

    def before(self, residual: Tensor, delta: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[T, H, D]``, keys and values ``[T, Hk, D]``, views of one tensor; ``delta`` is added to
        ``residual``."""
        weights = self.weights
        rows = residual.shape[0]
        if self._native is not None:
            return self._native.before(residual, delta, positions)
        if self._scratch is None or rows <= SLICE:
            qkv = weights.qkv(self._norm(residual, delta, weights.attention_norm))
        else:
            qkv = self._scratch.get("qkv", rows, self._query_size + 2 * self._kv_size)
            for part in slices(rows):
                added = None if delta is None else delta[part]
                qkv[part] = weights.qkv(self._norm(residual[part], added, weights.attention_norm))
        query, key, value = split_heads(qkv, self._heads, self._kv_heads, self._head_dim)
        self._ops.rotary(
            query,
            key,
            positions,
            self._table,
            query_weight=weights.query_norm,
            key_weight=weights.key_norm,
            eps=self._eps,
        )
        return query, key, value

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What the feed-forward network puts out ``[T, hidden_size]``; adds attention's output to ``residual``."""
        rows = residual.shape[0]
        if self._native is not None:
            return self._native.after(residual, attended)
        if self._scratch is None or rows <= SLICE or not self._sliced:
            return self._rows_after(residual, attended)
        out = self._scratch.get("delta", *residual.shape)
        for part in slices(rows):
            out[part] = self._rows_after(residual[part], attended[part])
        return out

    def _rows_after(self, residual: Tensor, attended: Tensor) -> Tensor:
        weights = self.weights
        out = weights.out(attended.reshape(attended.shape[0], self._query_size))
        del attended
        if weights.attention_output_norm is not None:
            out = self._ops.rms_norm(out, weights.attention_output_norm, self._eps, self._into(out))
        normed = self._norm(residual, out, weights.mlp_norm)
        del out
        out = weights.mlp(normed)
        if weights.mlp_output_norm is not None:
            out = self._ops.rms_norm(out, weights.mlp_output_norm, self._eps, self._into(out))
        return out

    def _norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = None if self._scratch is None else self._scratch.get("normed", *residual.shape)
        if delta is None:
            return self._ops.rms_norm(residual, weight, self._eps, out)
        return self._ops.add_rms_norm(delta, residual, weight, self._eps, out)

    def _into(self, x: Tensor) -> Tensor | None:
        """Where a norm of a linear layer's output goes: the output itself, unless results are to be new tensors."""
        return None if self._scratch is None else x
