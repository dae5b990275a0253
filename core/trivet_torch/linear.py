"""What a model multiplies with, whatever its weights are stored as."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Linear(ABC):
    """A matrix product with a bias or without. ``Quantization.linear`` returns one, and so do the packed and the plain
    layers here."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[T, in_features]``, rows may be strided; returns ``[T, out_features]`` in the type of ``x``."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of memory that its weights take, scales and bias included."""
