"""Copies between the host and a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trivet_kernels.transfer import packed, to_device, to_host, unpacked

CPU = torch.device("cpu")


def test_on_a_cpu_a_tensor_shares_the_arrays_memory_where_it_may() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert to_device(array, CPU).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    copy = to_device(array, CPU)
    copy += 1
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert to_device(array.T, CPU).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_goes_to_a_gpu_goes_through_pinned_memory_and_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def pin(tensor: Tensor) -> Tensor:
        done.append("pinned")
        return tensor

    def to(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        done.append((device.type, non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    assert to_device(np.array([3, 4]), torch.device("cuda")).tolist() == [3, 4]
    assert done == ["pinned", ("cuda", True)]


def test_what_is_read_together_keeps_its_shapes_types_and_bits() -> None:
    tensors = [
        torch.tensor([[1, -2], [3, 4]], dtype=torch.int32).t(),
        torch.tensor([[torch.nan, -torch.inf, 0.1]]),
        torch.empty(0, 5, dtype=torch.int32),
        torch.tensor([7], dtype=torch.int32),
    ]
    expected = [tensor.numpy() for tensor in tensors]
    for found in (unpacked(packed(tensors), tensors), to_host(*tensors)):
        for got, wanted in zip(found, expected, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)
