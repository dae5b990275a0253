"""Role ``quantization``: weight formats and their matrix products."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trivet.roles.base import Role


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear layer as its file holds it."""

    name: str  #: the layer's name in the model, without ``.weight``
    shape: tuple[int, int]  #: (out, in) of the matrix that the tensors stand for
    stored: str  #: a dtype, or the type of GGUF's blocks
    #: by suffix: ``weight`` (a tensor, or a raw array of GGUF blocks), ``bias``, and those of ``Quantization.suffixes``
    tensors: Mapping[str, Any] = field(default_factory=dict)
    #: to be told that rows ``[start, stop)`` of ``weight`` have been read: a mapped file need not stay in memory
    release: Callable[[int, int], None] | None = None


class Quantization(Role):
    """Turns weights as stored into modules that multiply with them. Lives in the worker."""

    role: ClassVar[str] = "quantization"
    #: suffixes of tensors that belong to a linear layer in this format, besides ``weight`` and ``bias``
    suffixes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def accepts(self, name: str, shape: tuple[int, ...], stored: str) -> bool:
        """Whether the linear weight ``name`` of ``shape`` (out, in), stored as ``stored`` (a dtype or GGUF type),
        is to be quantised."""

    @abstractmethod
    def linear(self, parts: Sequence[StoredLinear]) -> Any:
        """What multiplies with them, a ``trivet_torch.linear.Linear``: called with ``[T, in]`` it returns
        ``[T, sum of out]`` in the type of its input, the outputs of ``parts`` side by side, and ``weight_bytes`` says
        what it takes. A fused layer (query, key and value) has several parts, which may be stored in different types.
        The tensors of ``parts`` may be views of a mapped file and are not to be kept."""

    def planned_bytes(self, parts: Sequence[StoredLinear], *, bias: bool) -> int | None:
        """The ``weight_bytes`` of what :meth:`linear` would make of ``parts``, whose ``tensors`` are empty; None (the
        default) where that is known only then. Asked by a model that plans its weights (:meth:`Model.plan_weights`).

        Args:
            parts: Linear weights that :meth:`accepts` has accepted.
            bias: Whether all of them have a bias, or none has."""
        return None
