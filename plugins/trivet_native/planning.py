"""What a decoder's weights will take, from the headers of its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trivet.roles import StoredLinear
from trivet_kernels.reference.ops import ReferenceOps
from trivet_native.decoder import Decoder
from trivet_native.loading import EMBEDDING, SCORE, Loader
from trivet_torch.embedding import DeviceEmbedding
from trivet_torch.linear import Linear, PlainLinear, planned_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.roles import Quantization
    from trivet_native.spec import DecoderSpec, ExpertsSpec
    from trivet_torch.embedding import Embedding
    from trivet_torch.weights.stored import StoredWeights


def plan_decoder(
    weights: StoredWeights,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
    plain: bool,
    scores: bool,
) -> int | None:
    """Bytes of memory that the model will take, None if the quantization cannot tell.

    The decoder is built as for a start, of layers that have nothing but a size. ``scores``: whether it has a head for
    scores in place of one for tokens; for the others see :class:`Loader`.

    Raises:
        ModelLoadError: Tensors are missing or have other shapes.
    """
    planner = _Planner(
        weights,
        spec,
        dtype=dtype,
        device=device,
        quantization=quantization,
        ops=ReferenceOps(),
        tables=[torch.empty(0)] * len(spec.ropes),
        max_tokens=0,
        plain=plain,
    )
    try:
        decoder = Decoder(
            spec,
            planner.embedding(),
            [planner.block(index) for index in range(len(spec.layers))],
            planner.final_norm(),
            None if scores else planner.head(),
            ReferenceOps(),
        )
    except _UnknownSize:
        return None
    return decoder.weight_bytes + (planner.score_head().nbytes if scores else 0)


class _UnknownSize(Exception):
    """The quantization does not say what it makes of a layer."""


class _Sized(Linear):
    """A layer yet to be made."""

    def __init__(self, out_features: int, in_features: int, num_bytes: int) -> None:
        self.out_features, self.in_features, self._num_bytes = out_features, in_features, num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is loaded")

    @property
    def weight_bytes(self) -> int:
        return self._num_bytes


class _Planner(Loader):
    """Makes layers without contents; tensors are on torch's device ``meta``."""

    def embedding(self) -> Embedding:
        if self._device.type == "cpu":
            return super().embedding()
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        self._weights.expect(EMBEDDING, shape)
        self._embedding = DeviceEmbedding(torch.empty(shape, dtype=self._dtype, device="meta"))
        return self._embedding

    def score_head(self) -> Tensor:
        shape = (self._weights.shape(SCORE)[0], self._spec.hidden_size)
        self._weights.expect(SCORE, shape)
        return torch.empty(shape, device="meta")

    def _make(
        self, names: Sequence[str], quantization: Quantization | None, named: str | None, *, bias: bool
    ) -> Linear:
        weights = self._weights
        matrices = [weights.matrix(f"{name}.weight", self._dtype) for name in names]
        rows, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        if quantization is not None:
            parts = [
                StoredLinear(named or name, matrix.shape, weights.stored(f"{name}.weight"))
                for name, matrix in zip(names, matrices, strict=True)
            ]
            num_bytes = quantization.planned_bytes(parts, bias=bias)
            if num_bytes is None:
                raise _UnknownSize
        elif self._plain:
            num_bytes = PlainLinear.planned_bytes(rows, width, bias=bias, dtype=self._dtype)
        else:
            num_bytes = planned_bytes(rows, width, bias=bias, dtype=self._dtype, device=self._device)
        return _Sized(rows, width, num_bytes)

    def _stacked(self, path: str, experts: ExpertsSpec) -> None:
        return None  # as large as they are one by one

    def _vector(self, name: str, size: int) -> Tensor:
        self._weights.expect(name, (size,))
        return torch.empty(size, device="meta")
