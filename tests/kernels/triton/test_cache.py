"""Cache kernels against plain PyTorch's, in one piece of memory and in views of larger pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trivet_kernels.reference import cache as reference
from trivet_kernels.triton import cache as kernels

BLOCKS, SIZE, HEADS, DIM = 6, 4, 2, 3


def make_cache(dtype: torch.dtype, *, dense: bool, dim: int = DIM) -> Tensor:
    """Random numbers; without ``dense`` a view of pages that hold something else too."""
    size = SIZE * HEADS * dim
    pages = torch.randn(BLOCKS, size if dense else size + 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    return pages[:, :size].unflatten(1, (SIZE, HEADS, dim))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two caches hold the same bits."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_are_written_as_the_reference_writes_them(source: torch.dtype, dtype: torch.dtype, dense: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    # A part of a wider product, as queries, keys and values of one matrix are.
    fused = (10 * torch.randn(3, 5, DIM, generator=generator)).to(source)
    fused[1, 1] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    fused[1, 2] = torch.finfo(source).max
    key, value = fused[:, 1:3], (10 * torch.randn(3, HEADS, DIM + 1, generator=generator)).to(source)
    slots = torch.tensor([23, 0, 9])
    made, expected = ((make_cache(dtype, dense=dense), make_cache(dtype, dense=dense, dim=DIM + 1)) for _ in "ab")
    kernels.reshape_and_cache(key, value, *made, slots)
    reference.reshape_and_cache(key, value, *expected, slots)
    # The interpreter cuts float32 to bfloat16 where devices round.
    tolerance = 2**-7 if dtype is torch.bfloat16 and source is not dtype else 0
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.3), torch.tensor([0.3, 7.0])], ids=["float", "one", "heads"])
def test_tokens_are_divided_by_scales(scale: Tensor | float, dtype: torch.dtype) -> None:
    key, value = torch.randn(2, HEADS, DIM), torch.randn(2, HEADS, DIM)
    slots = torch.tensor([5, 2])
    made, expected = ([make_cache(dtype, dense=True) for _ in "kv"] for _ in "ab")
    kernels.reshape_and_cache(key, value, *made, slots, key_scale=scale, value_scale=2.0)
    reference.reshape_and_cache(key, value, *expected, slots, key_scale=scale, value_scale=2.0)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7 if dtype is torch.bfloat16 else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_eight_bit_float_and_what_lies_between_is_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values
    assert codes[-1] == torch.finfo(dtype).max
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([middles.nextafter(torch.tensor(torch.inf)), middles.nextafter(torch.tensor(-torch.inf))])
    numbers = torch.cat([codes, middles, near, torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    cache = torch.zeros(1, 1, 1, len(numbers), dtype=dtype)
    kernels.reshape_and_cache(numbers.view(1, 1, -1), numbers.view(1, 1, -1), cache, cache.clone(), torch.tensor([0]))
    assert same(cache.view(-1), numbers.to(dtype))


def test_padding_is_not_written() -> None:
    key = torch.randn(3, HEADS, DIM)
    made = [make_cache(torch.float32, dense=True) for _ in "kv"]
    before = make_cache(torch.float32, dense=True)
    kernels.reshape_and_cache(key, key, *made, torch.tensor([-1, 6, -1]))
    before.view(-1, HEADS, DIM)[6] = key[1]
    assert torch.equal(made[0], before)
    assert torch.equal(made[1], before)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_blocks_and_tokens_are_copied_as_they_were(dtype: torch.dtype, dense: bool) -> None:
    made, expected = make_cache(dtype, dense=dense), make_cache(dtype, dense=dense)
    # Chains and a cycle: a block that is written is another pair's source.
    pairs = torch.tensor([[1, 2], [2, 3], [5, 1]], dtype=torch.int32)
    source, destination = torch.tensor([6, 7, 9, 0]), torch.tensor([5, 6, 7, 23])
    for module, cache in ((kernels, made), (reference, expected)):
        module.copy_blocks(cache, pairs)
        module.move_tokens(cache, source, destination)
        module.zero_blocks(cache, torch.tensor([4, 3], dtype=torch.int32))
    assert same(made, expected)


def test_blocks_of_one_token_and_large_blocks_are_copied_whole() -> None:
    for shape in ((3, 1, 2, 5), (3, 64, 4, 40)):
        cache = torch.randn(shape)
        before = cache.clone()
        kernels.copy_blocks(cache, torch.tensor([[2, 0]]))
        kernels.move_tokens(cache, torch.tensor([shape[1]]), torch.tensor([2 * shape[1]]))
        assert torch.equal(cache[0], before[2])
        assert torch.equal(cache[2, 0], before[1, 0])
        assert torch.equal(cache[1], before[1])


def test_nothing_to_do_is_no_error() -> None:
    cache = make_cache(torch.float32, dense=True)
    before = cache.clone()
    none = torch.empty(0, dtype=torch.int64)
    kernels.copy_blocks(cache, torch.empty(0, 2, dtype=torch.int32))
    kernels.zero_blocks(cache, none)
    kernels.move_tokens(cache, none, none)
    kernels.reshape_and_cache(torch.empty(0, HEADS, DIM), torch.empty(0, HEADS, DIM), cache, cache, none)
    assert torch.equal(cache, before)
