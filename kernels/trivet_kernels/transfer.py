"""Between the host's arrays and a device's tensors: nothing that is sent waits, and what is read waits once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the array's type on a device, without waiting for it.

    On a CPU it shares the array's memory where that is contiguous and writable. To CUDA and ROCm devices the copy goes
    through pinned memory of torch's, which is used again only after the copy, so the array may be changed at once.
    """
    if not array.flags.writeable:
        array = array.copy()  # a view of a message; torch has no read-only tensors
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[NDArray[Any]]:
    """What is in tensors of one device whose elements have four bytes, read with one wait for it.

    On a CPU the arrays share the tensors' memory.
    """
    if len(tensors) < 2 or tensors[0].is_cpu:
        return [tensor.cpu().numpy() for tensor in tensors]
    return unpacked(packed(tensors).cpu(), tensors)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bits of tensors whose elements have four bytes, one tensor after the other, ``[n]`` int32."""
    return torch.cat([tensor.contiguous().view(torch.int32).flatten() for tensor in tensors])


def unpacked(bits: Tensor, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Arrays with the shapes and types of ``tensors`` out of what :func:`packed` made of them, brought to the host."""
    arrays, at = [], 0
    for tensor in tensors:
        part = bits[at : at + tensor.numel()]
        arrays.append(part.view(tensor.dtype).view(tensor.shape).numpy())
        at += tensor.numel()
    return arrays
