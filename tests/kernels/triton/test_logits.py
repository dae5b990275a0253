"""Masks, biases and penalties in Triton against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from _compile import TARGETS, compile_for
from torch import Tensor

from trivet_kernels.reference import logits as reference
from trivet_kernels.reference import sampling as reference_sampling
from trivet_kernels.reference.logits import SparseTokens
from trivet_kernels.triton import logits as kernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sparse(vocab_size: int, lengths: list[int], rows: list[int]) -> SparseTokens:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randperm(vocab_size, generator=generator)[:length] for length in lengths]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return SparseTokens(torch.tensor(rows), offsets, torch.cat(ids).int(), max(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 70, 1100, 2049])
def test_a_bitmask_leaves_what_it_allows(dtype: torch.dtype, vocab_size: int) -> None:
    wide = random(5, vocab_size + 9).to(dtype)
    words = -(-vocab_size // 32)
    mask = torch.randint(-(2**31), 2**31 - 1, (5, words), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    mask[1], mask[2] = -1, 0
    expected = wide.clone()
    reference_sampling.apply_bitmask(expected[:, :vocab_size], mask)
    kernels.apply_bitmask(wide[:, :vocab_size], mask)
    assert torch.equal(wide, expected)


def test_biases_are_added_to_their_tokens() -> None:
    tokens = sparse(900, [3, 0, 300], [4, 0, 2])
    logits, bias = random(5, 900), 10 * random(303, seed=1)
    expected = logits.clone()
    reference.add_bias(expected, tokens, bias)
    kernels.add_bias(logits, tokens, bias)
    assert torch.equal(logits, expected)
    assert (logits != random(5, 900)).sum(1).tolist() == [0, 0, 300, 0, 3]


def test_penalties_are_what_they_say() -> None:
    row = torch.tensor([[2.0, -2.0, 2.0, -2.0, 5.0]])
    tokens = SparseTokens(torch.tensor([0]), torch.tensor([0, 4], dtype=torch.int32), torch.arange(4).int(), 4)
    counts = torch.tensor([0, 0, 1, 3], dtype=torch.int32)
    for apply in (reference.apply_penalties, kernels.apply_penalties):
        logits = row.clone()
        apply(logits, tokens, counts, torch.tensor([2.0]), torch.tensor([0.25]), torch.tensor([0.5]))
        assert logits.tolist() == [[1.0, -4.0, 0.25, -5.25, 5.0]]


def test_penalties_of_many_rows() -> None:
    tokens = sparse(1500, [200, 1, 0, 129], [3, 0, 1, 4])
    counts = torch.randint(0, 4, (330,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    repetition, frequency, presence = 1 + random(3, 4).abs()
    logits = random(6, 1500)
    expected = logits.clone()
    reference.apply_penalties(expected, tokens, counts, repetition, frequency, presence)
    kernels.apply_penalties(logits, tokens, counts, repetition, frequency, presence)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    untouched = torch.ones(6, 1500, dtype=torch.bool)
    for index, row in enumerate(tokens.rows.tolist()):
        untouched[row, tokens.ids[tokens.offsets[index] : tokens.offsets[index + 1]].long()] = False
    assert torch.equal(logits[untouched], random(6, 1500)[untouched])


def test_nothing_to_change() -> None:
    empty = torch.empty(0, 10)
    kernels.apply_bitmask(empty, torch.empty(0, 1, dtype=torch.int32))
    none = sparse(10, [0], [0])
    logits = random(1, 10)
    kernels.add_bias(logits, none, torch.empty(0))
    kernels.apply_penalties(logits, none, torch.empty(0, dtype=torch.int32), *torch.ones(3, 1))
    assert torch.equal(logits, random(1, 10))


TOKENS = {"logits": "*fp32", "rows": "*i64", "offsets": "*i32", "ids": "*i32", "row_stride": "i32"}
PENALTIES = {"counts": "*i32", "repetitions": "*fp32", "frequencies": "*fp32", "presences": "*fp32"}
MASK = {"bitmask": "*i32", "logits_row_stride": "i32", "bitmask_row_stride": "i32", "vocab_size": "i32"}
CASES = {
    "bitmask_kernel": ({"logits": "*fp32", "num_words": "i32"} | MASK, {"words": 32}, 4),
    "bias_kernel": (TOKENS | {"bias": "*fp32"}, {"block": 128}, 1),
    "penalty_kernel": (TOKENS | PENALTIES, {"block": 128}, 1),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_without_spills(name: str, target: str) -> None:
    signature, constants, num_warps = CASES[name]
    unaligned = tuple(argument for argument, kind in signature.items() if kind == "i32")
    compiled = compile_for(
        f"trivet_kernels.triton.logits:{name}", signature, constants, target, num_warps=num_warps, unaligned=unaligned
    )
    assert compiled.shared <= compiled.shared_limit
    assert compiled.spills == 0
