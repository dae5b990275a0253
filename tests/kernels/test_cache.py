"""Writes to a paged cache, in one piece of memory and as views of larger pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trivet_kernels.reference.cache import (
    copy_blocks,
    move_tokens,
    read_tokens,
    reshape_and_cache,
    token_view,
    widened,
    zero_blocks,
)

BLOCKS, SIZE, HEADS, DIM = 6, 4, 2, 3


@pytest.fixture(params=["dense", "paged"])
def cache(request: pytest.FixtureRequest) -> Tensor:
    """A cache of known numbers; ``paged`` is a view of pages that hold something else too."""
    if request.param == "dense":
        out = torch.empty(BLOCKS, SIZE, HEADS, DIM)
    else:
        pages = torch.full((BLOCKS, SIZE * HEADS * DIM + 5), -1.0)
        out = pages[:, 2:-3].unflatten(1, (SIZE, HEADS, DIM))
        assert token_view(out) is None
    out.copy_(torch.arange(out.numel()).view(out.shape))
    return out


def flat(cache: Tensor) -> Tensor:
    return cache.reshape(-1, HEADS, DIM)


def test_tokens_are_written_to_their_places(cache: Tensor) -> None:
    before = flat(cache).clone()
    values = torch.zeros(BLOCKS, SIZE, HEADS, DIM + 1)
    slots = torch.tensor([23, 0, 9])
    key, value = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, DIM + 1)
    reshape_and_cache(key, value, cache, values, slots)
    before[slots] = key
    assert torch.equal(flat(cache), before)
    assert torch.equal(values.view(-1, HEADS, DIM + 1)[slots], value)
    assert torch.equal(read_tokens(cache, slots), key)


def test_tokens_are_converted_to_the_cache_dtype() -> None:
    cache = torch.zeros(2, 2, 1, 1, dtype=torch.bfloat16)
    tokens = torch.tensor([[[1.00390625]]])
    reshape_and_cache(tokens, tokens, cache, cache.clone(), torch.tensor([3]))
    assert cache[1, 1, 0, 0].item() == tokens.bfloat16().item()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dense", [True, False])
def test_eight_bit_floats_are_written_bounded_and_read_as_they_are(dtype: torch.dtype, dense: bool) -> None:
    most = torch.finfo(dtype).max
    cache = torch.zeros(BLOCKS, SIZE * HEADS * DIM + (0 if dense else 5), dtype=torch.uint8).view(dtype)
    cache = cache[:, : SIZE * HEADS * DIM].unflatten(1, (SIZE, HEADS, DIM))
    tokens = torch.tensor([1e9, -torch.inf, 1.0, -0.75, 0.0, torch.nan]).view(1, HEADS, DIM)
    reshape_and_cache(tokens, 2 * tokens, cache, values := cache.clone(), torch.tensor([9]))
    read = read_tokens(cache, torch.tensor([9, 0]))
    assert read.dtype is dtype
    expected = torch.tensor([[most, -most, 1.0, -0.75, 0.0, torch.nan], [0.0] * 6]).view(2, HEADS, DIM)
    torch.testing.assert_close(read.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert read_tokens(values, torch.tensor([9]))[0, 0, 2].item() == 2.0
    assert widened(read, torch.bfloat16, torch.tensor([0.5, 4.0]))[0, 1, 0].item() == -3.0


def test_writing_a_large_view_does_not_copy_it() -> None:
    cache = torch.zeros(3, 1, 1, 4).transpose(1, 2)  # strides of dimensions of size one say nothing
    view = token_view(cache)
    assert view is not None
    assert view.data_ptr() == cache.data_ptr()


def test_blocks_are_copied_as_they_were(cache: Tensor) -> None:
    before = cache.clone()
    copy_blocks(cache, torch.tensor([[1, 2], [2, 3], [5, 1]], dtype=torch.int32))
    assert torch.equal(cache[[2, 3, 1]], before[[1, 2, 5]])
    assert torch.equal(cache[[0, 4, 5]], before[[0, 4, 5]])


def test_blocks_are_zeroed(cache: Tensor) -> None:
    before = cache.clone()
    zero_blocks(cache, torch.tensor([4, 2], dtype=torch.int32))
    assert not cache[[2, 4]].any()
    assert torch.equal(cache[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def test_moved_tokens_may_overlap(cache: Tensor) -> None:
    before = flat(cache).clone()
    move_tokens(cache, torch.tensor([6, 7, 9]), torch.tensor([5, 6, 7]))
    assert torch.equal(flat(cache)[[5, 6, 7]], before[[6, 7, 9]])
    rest = [i for i in range(BLOCKS * SIZE) if i not in (5, 6, 7)]
    assert torch.equal(flat(cache)[rest], before[rest])


def test_nothing_to_do_is_no_error(cache: Tensor) -> None:
    before = cache.clone()
    copy_blocks(cache, torch.empty(0, 2, dtype=torch.int32))
    zero_blocks(cache, torch.empty(0, dtype=torch.int32))
    move_tokens(cache, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert torch.equal(cache, before)
