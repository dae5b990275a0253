"""The native search for the likeliest token finds what the plain one finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trivet_kernels.cpu.build import library, problem
from trivet_kernels.cpu.sampling import NativeSampling
from trivet_kernels.reference import sampling as reference
from trivet_kernels.sampling import argmax


@pytest.fixture(scope="module")
def native() -> NativeSampling:
    found = library()
    if found is None:
        pytest.skip(f"no native kernels: {problem()}")
    return NativeSampling(found)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def same(native: NativeSampling, logits: Tensor, size: int) -> Tensor:
    """Both agree in ids, values and dtype; returns the ids."""
    ids, values = native.argmax(logits, size)
    want_ids, want_values = reference.argmax(logits, size)
    assert torch.equal(ids, want_ids)
    assert values.dtype == logits.dtype
    assert torch.equal(values.nan_to_num(12345.0), want_values.nan_to_num(12345.0))
    return ids


@pytest.mark.parametrize("size", [1, 7, 40, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_the_largest_and_of_equals_the_first(native: NativeSampling, dtype: torch.dtype, rows: int, size: int) -> None:
    whole = torch.randn(rows, size + 9).mul(3).round().to(dtype)  # many equals
    whole[:, size + 1 :] = 100.0  # beyond what counts
    same(native, whole[:, 1:], size)


@pytest.mark.parametrize("at", [0, 5, 1030, 2999])
def test_a_nan_is_largest_and_the_first_of_them_counts(native: NativeSampling, dtype: torch.dtype, at: int) -> None:
    logits = torch.randn(3, 3000).to(dtype)
    logits[1, at] = torch.nan
    logits[1, 2999] = -torch.tensor(torch.nan)
    logits[1, 3] = torch.inf
    assert int(same(native, logits, 3000)[1]) == at


def test_masked_rows_and_signed_zeros(native: NativeSampling, dtype: torch.dtype) -> None:
    logits = torch.full((4, 2500), -torch.inf, dtype=dtype)
    logits[1, 2100] = -3.0
    logits[2, 1200:1300] = 0.0
    logits[2, 1100] = -0.0
    logits[3, [7, 9]] = torch.inf
    assert same(native, logits, 2500).tolist() == [0, 2100, 1100, 7]


def test_transposed_logits_are_left_to_torch(native: NativeSampling) -> None:
    same(native, torch.randn(300, 4).t(), 300)


@pytest.mark.parametrize("size", [0, 6])
def test_sizes_beyond_the_logits_are_refused(native: NativeSampling, size: int) -> None:
    with pytest.raises(ValueError, match=rf"size must be in \[1, 5\].*not {size}"):
        native.argmax(torch.zeros(2, 5), size)


def test_every_device_has_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    ids, values = argmax(logits, 3)
    assert (ids.item(), values.item()) == (1, 3.0)
    assert argmax(logits.to("meta")[:, :3], 3)[0].shape == (1,)
