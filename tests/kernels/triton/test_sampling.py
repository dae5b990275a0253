"""Draws, cuts, noise and logprobs in Triton against the plain PyTorch ones, which have tests of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from _compile import TARGETS, compile_for
from torch import Tensor

from trivet_kernels.reference import noise as reference_noise
from trivet_kernels.reference import sampling as reference
from trivet_kernels.triton.logprobs import logprobs
from trivet_kernels.triton.noise import exponential, group_noise, philox, token_excess
from trivet_kernels.triton.sampling import DRAW_WARPS, MAX_SIZE, Parameters, draw, parameters

Row = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


@triton.jit
def noise_kernel(
    out: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    first: tl.tensor,
    words: tl.tensor,
    count: tl.constexpr,
    purpose: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    place = tl.arange(0, count)
    index = tl.load(first + row) + place
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    word, _ = philox(index, position, seed, purpose)
    tl.store(words + row * count + place, word.to(tl.int64))
    if purpose == 0:
        smallest, member = group_noise(index, position, seed)
        tl.store(out + row * 2 * count + place, smallest)
        tl.store(out + row * 2 * count + count + place, member.to(tl.float64))
    else:
        tl.store(out + row * 2 * count + place, token_excess(index, position, seed))
        tl.store(out + row * 2 * count + count + place, exponential(word))


def test_noise_is_the_references_to_the_last_bit() -> None:
    """In the interpreter, whose logarithm is the CPU's; a GPU's may be off by the last bit of a float64."""
    generator = torch.Generator().manual_seed(0)
    seeds = torch.cat([torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator), torch.tensor([0, -1, 1 << 62])])
    positions = torch.randint(0, 2**31 - 1, (8,), generator=generator)
    first = torch.randint(0, 150_000, (8,), generator=generator, dtype=torch.int32)
    for purpose in (0, 1):
        out, words = torch.empty(8, 2, 64, dtype=torch.float64), torch.empty(8, 64, dtype=torch.int64)
        noise_kernel[(8,)](out, seeds, positions, first, words, count=64, purpose=purpose)
        for row in range(8):
            index = int(first[row]) + torch.arange(64)
            seed, position = (column[row].expand(64) for column in (seeds, positions))
            zero = torch.zeros_like(index)
            key = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
            expected = reference_noise.philox4x32((index, position, zero, zero + purpose), key)
            assert torch.equal(words[row], expected[0])
            if purpose == 0:
                smallest, member = reference_noise.group_noise(seed, position, index)
                assert torch.equal(out[row, 1].long(), member)
            else:
                smallest = reference_noise.token_excess(seed, position, index)
            torch.testing.assert_close(out[row, 0], smallest, rtol=4e-16, atol=0)


def columns(rows: list[Row], seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return {
        "temperature": np.array(temperature, np.float32),
        "top_k": np.array(top_k, np.int64),
        "top_p": np.array(top_p, np.float64),
        "min_p": np.array(min_p, np.float64),
        "seeds": generator.integers(-(2**63), 2**63 - 1, len(rows)),
        "positions": generator.integers(0, 5000, len(rows)),
    }


def draw_by_reference(logits: Tensor, size: int, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    table = {name: torch.from_numpy(column) for name, column in given.items()}
    greedy = table["temperature"] == 0
    block = reference.grouped(logits, size)
    divisor = torch.where(greedy, 1.0, table["temperature"])[:, None]
    block.values.div_(divisor)
    block.maxima.div_(divisor)
    ids = reference.argmax(logits, size)[0]
    if len(chosen := (~greedy & block.highest.isfinite()).nonzero()[:, 0]):
        part = reference.GroupedLogits(block.values[chosen], block.maxima[chosen])
        cut = reference.survivors(part, *(table[name][chosen] for name in ("top_k", "top_p", "min_p")))
        ids[chosen] = reference.draw(part, *cut, table["seeds"][chosen], table["positions"][chosen])
    return torch.where(block.highest.isfinite(), ids, 0), block.highest


def assert_draws(logits: Tensor, size: int, rows: list[Row], seed: int = 0) -> list[int]:
    given = columns(rows, seed)
    before = logits.clone()
    drawn = draw(logits, size, parameters(**given))
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    ids, highest = draw_by_reference(logits, size, given)
    assert drawn[0].tolist() == ids.tolist()
    assert torch.equal(drawn[1].view(torch.float32).nan_to_num(7.0), highest.nan_to_num(7.0))
    found: list[int] = drawn[0].tolist()
    return found


def random_logits(rows: int, size: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


ROWS: list[Row] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.3, 40, 1.0, 0.0),
    (0.8, 300, 0.9, 0.0),
    (1.0, 0, 0.95, 0.0),
    (2.0, 0, 0.9999, 0.0),
    (1.0, 0, 1e-4, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 10, 0.7, 0.05),
    (1.5, 0, 0.7, 0.02),
    (1.0, 10**9, 0.3, 1e-9),
]


@pytest.mark.parametrize(("size", "scale"), [(100, 0.0), (100, 3.0), (2500, 0.3), (2500, 5.0)])
def test_tokens_are_the_references(size: int, scale: float) -> None:
    wide = random_logits(len(ROWS), size + 37, scale=scale)
    wide[:, size:] = 100.0  # of ids that the tokenizer does not have
    assert_draws(wide, size, ROWS, seed=size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_logits_are_cut_by_id(dtype: torch.dtype) -> None:
    rows: list[Row] = [(1.0, k, 1.0, 0.0) for k in (2, 7, 250)]
    rows += [(1.0, 0, p, 0.0) for p in (0.25, 0.8)] + [(0.0, 0, 1.0, 0.0), (1.0, 7, 0.5, 0.0)]
    logits = random_logits(len(rows), 700, scale=1.0).round().to(dtype)
    logits[:, 5] = -0.0
    assert_draws(logits, 700, rows)


@pytest.mark.parametrize("size", [1, 128, 129])
def test_small_vocabularies(size: int) -> None:
    rows: list[Row] = [(0.0, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, size, 1.0, 0.0), (1.0, max(size - 1, 1), 0.5, 0.1)]
    assert_draws(random_logits(4, size), size, rows)


def test_a_row_draws_the_same_alone_and_from_a_strided_view() -> None:
    wide = random_logits(2 * len(ROWS), 1000)
    logits, given = wide[::2], columns(ROWS)
    together = draw(logits, 1000, parameters(**given))
    for row in (1, 4, 5, 9):
        one = {name: column[row : row + 1] for name, column in given.items()}
        assert torch.equal(draw(logits[row : row + 1], 1000, parameters(**one)), together[:, row : row + 1])


def test_one_finite_logit_is_drawn_whatever_the_cuts() -> None:
    logits = torch.full((len(ROWS), 300), -torch.inf)
    logits[:, 177] = -3.0
    assert assert_draws(logits, 300, ROWS) == [177] * len(ROWS)


def test_rows_that_nothing_can_be_drawn_from_say_so() -> None:
    logits = random_logits(6, 200)
    logits[0, 150] = logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 199] = logits[4, 0] = torch.inf
    sampled, greedy = (1.0, 5, 0.9, 0.0), (0.0, 0, 1.0, 0.0)
    assert assert_draws(logits, 200, [sampled, greedy, sampled, sampled, greedy, sampled])[:5] == [0] * 5


def test_no_rows_and_bad_sizes() -> None:
    none = Parameters(torch.empty(6, 0, dtype=torch.int64), total=False)
    assert draw(torch.empty(0, 10), 10, none).shape == (2, 0)
    for size in (0, MAX_SIZE + 1):
        with pytest.raises(ValueError, match="size must be from 1 to"):
            draw(torch.empty(0, 10), size, none)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_ranks_and_alternatives(dtype: torch.dtype) -> None:
    size, vocab_size, count = 500, 530, 6
    logits = random_logits(4, vocab_size).to(dtype)
    logits[1] = logits[1].round()
    logits[2, 3:] = -torch.inf
    logits[3, 40] = torch.nan
    tokens = torch.tensor([7, 499, 1, 5])
    ids, values, ranks = logprobs(logits, tokens, count, size)
    wide = logits.float()
    expected = wide - wide.logsumexp(1, keepdim=True)
    assert torch.equal(ids[:, 0].long(), tokens)
    torch.testing.assert_close(values, expected.gather(1, ids.long()), rtol=2e-6, atol=2e-6, equal_nan=True)
    assert values[3].isnan().all()
    own = wide.gather(1, tokens[:, None])
    assert torch.equal(ranks, (wide[:, :size] > own).sum(1).int() + 1)
    order = wide[:3, :size].sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(ids[:3, 1:].long(), order)


def test_logprobs_of_the_token_alone() -> None:
    logits = random_logits(2, 130)
    ids, values, ranks = logprobs(logits, torch.tensor([129, 4]), 0, 130)
    assert ids.tolist() == [[129], [4]]
    torch.testing.assert_close(values[:, 0], logits.log_softmax(1)[[0, 1], [129, 4]])
    assert logprobs(logits[:0], torch.empty(0, dtype=torch.int64), 0, 130)[0].shape == (0, 1)
    assert ranks.min() >= 1


VOCABULARY = 151_936
SCAN = {"logits": "*bf16", "maxima": "*fp32", "sums": "*fp32", "row_stride": "i32", "size": "i32"}
SCAN |= {"vocab_size": "i32", "num_groups": "i32"}
COLUMNS = {"temperatures": "*fp64", "top_ks": "*i64", "top_ps": "*fp64", "log_min_ps": "*fp64", "seeds": "*i64"}
Case = tuple[str, dict[str, str], dict[str, Any], int]


def scan_case(dtype: str, *, draws: bool, groups: int) -> Case:
    constants: dict[str, Any] = {"divide": draws, "total": True, "beyond": not draws, "groups": groups}
    signature = SCAN | {"logits": f"*{dtype}"} | ({"temperatures": "*fp64"} if draws else {"tops": "*fp32"})
    return "_rank:group_kernel", signature, constants | {"tops" if draws else "temperatures": None}, 4


def draw_case(dtype: str, size: int, *, total: bool) -> Case:
    signature = COLUMNS | {"logits": f"*{dtype}", "positions": "*i64", "maxima": "*fp32", "sums": "*fp32"}
    signature |= {"chosen": "*i32", "drawn": "*i32", "highests": "*fp32", "row_stride": "i32", "size": "i32"}
    groups = triton.next_power_of_2(-(-size // reference_noise.GROUP))
    constants = {"total": total, "id_bits": (size - 1).bit_length(), "block_groups": groups}
    return "_draw:draw_kernel", signature | {"num_groups": "i32"}, constants, DRAW_WARPS


def logprobs_case(dtype: str) -> Case:
    signature = {"logits": f"*{dtype}", "tokens": "*i64", "maxima": "*fp32", "tops": "*fp32", "sums": "*fp32"}
    signature |= {"ids_out": "*i32", "values_out": "*fp32", "row_stride": "i32", "size": "i32", "num_groups": "i32"}
    return "logprobs:logprobs_kernel", signature | {"alternatives": "i32"}, {"id_bits": 18, "block_groups": 2048}, 4


def ranks_case(dtype: str) -> Case:
    signature = {"logits": f"*{dtype}", "tokens": "*i64", "ranks": "*i32", "row_stride": "i32", "size": "i32"}
    return "logprobs:ranks_kernel", signature, {"block": 4096}, 4


DEFAULT_CASES = [
    scan_case("bf16", draws=True, groups=32),
    draw_case("bf16", VOCABULARY, total=True),
    logprobs_case("bf16"),
    ranks_case("bf16"),
]
MORE_CASES = [
    *(scan_case(dtype, draws=draws, groups=8) for dtype in ("fp32", "bf16", "fp16") for draws in (True, False)),
    *(draw_case(dtype, VOCABULARY, total=total) for dtype in ("fp32", "fp16") for total in (True, False)),
    *(draw_case("bf16", size, total=True) for size in (32_000, 262_144, MAX_SIZE)),
    *(case(dtype) for dtype in ("fp32", "fp16") for case in (logprobs_case, ranks_case)),
]


def assert_fits(case: Case, target: str) -> None:
    kernel, signature, constants, num_warps = case
    # A vocabulary is no multiple of anything that a compiler may count on.
    given = tuple(
        name for name in ("row_stride", "size", "vocab_size", "num_groups", "alternatives") if name in signature
    )
    compiled = compile_for(
        f"trivet_kernels.triton.{kernel}", signature, constants, target, num_warps=num_warps, unaligned=given
    )
    assert compiled.shared <= compiled.shared_limit
    assert compiled.spills == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", DEFAULT_CASES, ids=lambda case: case[0].partition(":")[2])
def test_kernels_compile_without_spills(case: Case, target: str) -> None:
    assert_fits(case, target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case[0].partition(":")[2])
def test_all_variants_compile_without_spills(case: Case, target: str) -> None:
    assert_fits(case, target)
