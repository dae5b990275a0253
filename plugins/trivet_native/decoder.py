"""The forward pass of a decoder over flattened tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trivet_native.layers import capture_problem
from trivet_torch.embedding import DeviceEmbedding
from trivet_torch.linear import PlainLinear

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.ops import Ops
    from trivet_native.fused import FusedHead
    from trivet_native.layers import Block, Scratch
    from trivet_native.spec import DecoderSpec
    from trivet_torch.embedding import Embedding
    from trivet_torch.linear import Linear

#: ``(layer, query, key, value) → [T, H, D]``
Attend = Callable[[int, "Tensor", "Tensor", "Tensor"], "Tensor"]


class Decoder:
    """Embedding, layers, norm and head."""

    def __init__(
        self,
        spec: DecoderSpec,
        embedding: Embedding,
        blocks: Sequence[Block],
        norm: Tensor,
        head: Linear | None,
        ops: Ops,
        *,
        native_head: FusedHead | None = None,
        scratch: Scratch | None = None,
        compiled: bool = False,
    ) -> None:
        """Without ``head`` there are hidden states only; ``native_head`` computes the same, if there is one.
        ``scratch`` is what the blocks compute in. With ``compiled`` torch.compile gets what lies between attention
        calls; blocks must be made of torch's own operations then, without scratch memory. Mixtures of experts depend on
        the data and stay as they are."""
        self._scratch = scratch
        self._spec, self._embedding, self._blocks = spec, embedding, blocks
        self._norm, self._head, self._native_head, self._ops = norm, head, native_head, ops
        self._pieces = [(block.before, block.after) for block in blocks]
        if compiled:
            self._pieces = [
                (_compiled(block.before), _compiled(block.after) if layer.experts is None else block.after)
                for block, layer in zip(blocks, spec.layers, strict=True)
            ]

    def body(
        self, ids: Tensor, positions: Tensor, attend: Attend, wanted: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The residual stream behind the last layer ``[T, hidden_size]``, and behind each of the ``wanted`` layers."""
        residual, delta, outputs = self.layers(ids, positions, attend, wanted)
        return residual if delta is None else residual.add_(delta), outputs

    def layers(
        self, ids: Tensor, positions: Tensor, attend: Attend, wanted: Collection[int] = ()
    ) -> tuple[Tensor, Tensor | None, dict[int, Tensor]]:
        """As :meth:`body`, before the last layer's output, if there is a layer, is added to the stream. It is lost with
        the next step."""
        residual = self._embedding(ids)
        delta: Tensor | None = None
        outputs: dict[int, Tensor] = {}
        for index, (before, after) in enumerate(self._pieces):
            # No name keeps a result beyond its use: in a long step each takes megabytes.
            projected = before(residual, delta, positions)
            del delta
            attended = [attend(index, *projected)]
            del projected
            delta = after(residual, attended.pop())
            if index in wanted:
                outputs[index] = residual + delta
        return residual, delta, outputs

    def final_norm(self, residual: Tensor, delta: Tensor | None = None) -> Tensor:
        """The hidden states that the head sees ``[n, hidden_size]``; ``delta`` is added to ``residual`` first."""
        if delta is None:
            return self._ops.rms_norm(residual, self._norm, self._spec.eps)
        return self._ops.add_rms_norm(delta, residual, self._norm, self._spec.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]`` of hidden states after the final norm."""
        head = self._native_head or self._head
        assert head is not None, "a model that classifies has no logits"
        logits = head(hidden)
        cap = self._spec.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def release(self) -> None:
        """Give back the memory that is kept for logits and for what layers compute in, between the parts of a long
        step."""
        if self._native_head is not None:
            self._native_head.release()
        if self._scratch is not None:
            self._scratch.release()

    @property
    def capture_problem(self) -> str | None:
        """What of the weights' layers cannot be recorded into a CUDA graph, None if all can."""
        for index, block in enumerate(self._blocks):
            if (problem := block.weights.capture_problem) is not None:
                return f"layer {index}: {problem}"
        return capture_problem({"lm_head": self._head})

    @property
    def sinks(self) -> list[Tensor | None]:
        """Attention sinks of each layer."""
        return [block.weights.sinks for block in self._blocks]

    @property
    def _is_tied(self) -> bool:
        """Whether the head multiplies with the embedding matrix itself, on an accelerator."""
        head, embedding = self._head, self._embedding
        return (
            isinstance(head, PlainLinear) and isinstance(embedding, DeviceEmbedding) and head.weight is embedding.weight
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take; what is read from the file when it is needed takes none."""
        blocks = sum(block.weights.num_bytes for block in self._blocks)
        head = 0 if self._head is None or self._is_tied else self._head.weight_bytes
        return blocks + self._embedding.weight_bytes + self._norm.nbytes + head


def _compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
    """``piece``, compiled for any number of rows; the shapes of weights are constants, which is quicker to compile than
    to have all sizes vary."""
    compiled = torch.compile(piece)

    def call(*tensors: Tensor | None) -> Any:
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*tensors)

    return call
