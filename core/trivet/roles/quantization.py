"""Role ``quantization``: weight formats and their matrix products."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from trivet.roles.base import Role


class Quantization(Role):
    """Turns weights as stored into modules that multiply with them. Lives in the worker."""

    role: ClassVar[str] = "quantization"

    @abstractmethod
    def accepts(self, name: str, shape: tuple[int, ...], stored: str) -> bool:
        """Whether the linear weight ``name`` of ``shape`` (out, in), stored as ``stored`` (a dtype or GGUF type),
        is to be quantised."""

    @abstractmethod
    def linear(self, weight: Any, bias: Any) -> Any:
        """A module that maps ``[..., in]`` to ``[..., out]``; ``weight`` is a tensor or a raw GGUF block array."""
