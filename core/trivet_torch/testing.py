"""What plugin authors need besides ``trivet.testing`` when their provider works on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from trivet.testing.suites import ArraySuite


class TorchArrays(ArraySuite):
    """Gives a suite torch tensors; derive a test class from it before the suite.

    ::

    class TestMyAttention(TorchArrays, AttentionSuite): ...
    """

    float_types: ClassVar[Sequence[str]] = ("float32", "bfloat16", "float16")

    def tensor(self, array: Any, dtype: str | None = None) -> torch.Tensor:
        """A tensor on the device."""
        tensor = torch.from_numpy(array).to(self.device)
        return tensor if dtype is None else tensor.to(getattr(torch, dtype))

    def numpy(self, tensor: Any) -> Any:
        """A numpy array; bfloat16 becomes float32."""
        tensor = torch.as_tensor(tensor).detach().cpu()
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
