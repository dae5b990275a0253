"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trivet_kernels.moe import StackedExperts, mixture
from trivet_native.layers import capture_problem

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_native.layers import FeedForward
    from trivet_native.spec import ExpertsSpec
    from trivet_torch.linear import Linear


class ClampedSwiGLU:
    """GPT-OSS's activation ``gate * sigmoid(slope * gate) * (up + 1)``, with ``gate`` at most ``limit`` and ``up``
    within ``±limit``. Gate and up take turns in the columns of its input.

    Source: the model card of gpt-oss-120b and gpt-oss-20b, 2025, and GptOssExperts of transformers.
    """

    def __init__(self, slope: float, limit: float) -> None:
        self._slope, self._limit = slope, limit

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` ``[T, 2N]``; returns ``[T, N]``, in ``out`` if that is given. Computed in float32, rounded once."""
        gate = x[:, ::2].float().clamp(max=self._limit)
        up = x[:, 1::2].float().clamp(-self._limit, self._limit)
        product = torch.sigmoid(gate * self._slope).mul_(gate).mul_(up.add_(1))
        return product.to(x.dtype) if out is None else out.copy_(product)


class Experts:
    """Every token goes through the ``top_k`` experts that its router scores highest, and through the shared expert if
    there is one (Shazeer et al., "Outrageously Large Neural Networks", 2017).

    Stacked experts are multiplied all at once. Of others, tokens are sorted by expert, so that each expert that has
    tokens computes them in one product. A token's outputs are added up in the order of its experts' scores, in float32:
    its result does not depend on its neighbours.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Linear,
        experts: Sequence[FeedForward] | StackedExperts,
        shared: FeedForward | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        """``shared_gate`` maps ``[T, hidden_size]`` to ``[T, 1]``, whose sigmoid is the shared expert's factor."""
        self._spec, self._router, self._experts = spec, router, experts
        self._shared, self._shared_gate = shared, shared_gate

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = route(self._spec, self._router(x))
        if isinstance(self._experts, StackedExperts):
            out = mixture(x, chosen, weights, self._experts)
        else:
            out = self._separate(x, chosen, weights, self._experts)
        if self._shared is not None:
            shared = self._shared(x)
            if self._shared_gate is not None:
                shared = shared * torch.sigmoid(self._shared_gate(x))
            out = out + shared
        return out

    def _separate(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[FeedForward]) -> Tensor:
        """The weighted sums ``[T, hidden_size]`` of experts that are layers of their own."""
        rows, top_k = chosen.shape
        if rows == 1:
            outputs = torch.cat([experts[expert](x) for expert in chosen[0].tolist()])
        else:
            outputs = self._grouped(x, chosen.flatten(), experts)
        outputs = outputs.view(rows, top_k, -1)
        total = outputs[:, 0].float() * weights[:, :1]
        for place in range(1, top_k):
            total.addcmul_(outputs[:, place].float(), weights[:, place : place + 1])
        return total.to(x.dtype)

    def _grouped(self, x: Tensor, chosen: Tensor, experts: Sequence[FeedForward]) -> Tensor:
        """The output of each token's experts ``[T * top_k, hidden_size]``; ``chosen`` ``[T * top_k]``."""
        order = torch.argsort(chosen, stable=True)
        inputs = x[order // self._spec.top_k]
        sorted_outputs = torch.empty_like(inputs)
        first = 0
        for expert, count in enumerate(torch.bincount(chosen, minlength=self._spec.count).tolist()):
            if count:
                part = slice(first, first + count)
                sorted_outputs[part] = experts[expert](inputs[part])
                first += count
        outputs = torch.empty_like(sorted_outputs)
        outputs[order] = sorted_outputs
        return outputs

    @property
    def capture_problem(self) -> str | None:
        """See :class:`trivet_native.layers.FeedForward`."""
        if not isinstance(self._experts, StackedExperts):
            return "the numbers of the experts' tokens are read, which are multiplied one expert after the other"
        problem = capture_problem({"router": self._router, "shared_expert_gate": self._shared_gate})
        return problem if problem is not None or self._shared is None else self._shared.capture_problem

    @property
    def weight_bytes(self) -> int:
        experts = [self._experts] if isinstance(self._experts, StackedExperts) else self._experts
        parts = [self._router, *experts, self._shared, self._shared_gate]
        return sum(part.weight_bytes for part in parts if part is not None)


def route(spec: ExpertsSpec, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[T, top_k]`` float32 and numbers ``[T, top_k]`` of the experts that the router's ``scores`` ``[T,
    count]`` choose, the best one first; the softmax is in float32."""
    if spec.softmax_of_chosen:
        best, chosen = torch.topk(scores, spec.top_k, dim=-1)
        return torch.softmax(best.float(), dim=-1), chosen
    weights, chosen = torch.topk(torch.softmax(scores.float(), dim=-1), spec.top_k, dim=-1)
    if spec.normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen
