"""Cuts and draws against a slow reference: one row at a time, in float64, over the whole vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from trivet_kernels.reference import sampling
from trivet_kernels.reference.noise import gumbel_noise
from trivet_kernels.reference.sampling import GroupedLogits, apply_bitmask, argmax, draw, grouped, survivors, top

Params = tuple[int, float, float]  # top_k, top_p, min_p


def ranking(row: Tensor) -> NDArray[np.int64]:
    values = row.double().numpy()
    order = np.lexsort((np.arange(len(values)), -values))
    return order[values[order] > -np.inf]


def allowed(row: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    values, order = row.double().numpy(), ranking(row)
    highest = values[order[0]]
    if min_p > 0:
        order = order[values[order] >= highest + math.log(min_p)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        weights = np.exp(values[order] - highest)
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        order = order[before < top_p * weights.sum()]
    return set(order.tolist())


def kept(logits: GroupedLogits, row: int, least: Tensor, last: Tensor) -> set[int]:
    values, ids = logits.values[row], torch.arange(logits.values.shape[1])
    survive = (values > least[row]) | ((values == least[row]) & (ids <= last[row]))
    return set(survive.nonzero()[:, 0].tolist())


def cut(logits: GroupedLogits, params: list[Params]) -> tuple[Tensor, Tensor]:
    top_k, top_p, min_p = zip(*params, strict=True)
    wide = torch.float64
    return survivors(logits, torch.tensor(top_k), torch.tensor(top_p, dtype=wide), torch.tensor(min_p, dtype=wide))


def assert_cut(logits: GroupedLogits, params: list[Params]) -> tuple[Tensor, Tensor]:
    least, last = cut(logits, params)
    for row, (top_k, top_p, min_p) in enumerate(params):
        got = kept(logits, row, least, last)
        # Probabilities are summed in another order here, so a token exactly at the edge may fall on either side.
        narrow, wide = (allowed(logits.values[row], top_k, min(1.0, top_p * s), min_p) for s in (1 - 1e-6, 1 + 1e-6))
        if top_p == 1:
            narrow = wide
        assert narrow <= got <= wide
    return least, last


def random_logits(rows: int, size: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


PARAMS: list[Params] = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (40, 1.0, 0.0),
    (300, 0.9, 0.0),
    (2000, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.95, 0.0),
    (0, 0.9999, 0.0),
    (0, 1e-4, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 0.999),
    (0, 0.7, 0.05),
    (10, 0.7, 0.05),
    (10**9, 0.3, 1e-9),
]


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 6.0])
@pytest.mark.parametrize("size", [1, 100, 128, 5000, 30_000])
def test_cuts_equal_the_reference_whatever_the_batch(size: int, scale: float) -> None:
    logits = grouped(random_logits(len(PARAMS), size, scale=scale), size)
    least, last = assert_cut(logits, PARAMS)
    for row, params in enumerate(PARAMS):
        alone = cut(GroupedLogits(logits.values[row : row + 1], logits.maxima[row : row + 1]), [params])
        assert (alone[0].item(), alone[1].item()) == (least[row].item(), last[row].item())


def test_equal_logits_are_ranked_by_id() -> None:
    row = torch.zeros(1, 1000)
    row[0, [900, 17, 300]] = 1.0
    row[0, 5] = -0.0
    logits = grouped(row, 1000)
    for count in (1, 2, 5):
        values, ids = top(logits, count)
        assert ids[0].tolist() == [17, 300, 900, 0, 1][:count]
        assert values[0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0][:count]
        assert kept(logits, 0, *cut(logits, [(count, 1.0, 0.0)])) == set(ids[0].tolist())
    assert kept(logits, 0, *cut(logits, [(0, 1e-4, 0.0)])) == {17}


@pytest.mark.parametrize("count", [1, 7, 32, 128, 500, 2500])
def test_top_equals_a_stable_sort(count: int) -> None:
    rows = random_logits(3, 100_000, scale=2.0)
    rows[1] = rows[1].bfloat16().float()  # many equals
    rows[2, 50:] = -torch.inf
    logits = grouped(rows, 100_000)
    values, ids = top(logits, count)
    expected = logits.values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :count])
    finite = values > -torch.inf
    assert torch.equal(ids[finite], expected.indices[:, :count][finite])


def test_a_cut_far_down_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p keeps tens of thousands of tokens, among many equal ones, whatever the bins."""
    rows = random_logits(4, 70_000, scale=0.3)
    rows[1] = rows[1].bfloat16().float()
    rows[2] = rows[2].round()
    rows[3] = 1.0
    logits = grouped(rows, 70_000)
    params: list[Params] = [(0, 0.95, 0.0), (0, 0.95, 0.3), (0, 0.6, 0.0), (0, 0.5, 0.0)]
    before = assert_cut(logits, params)
    monkeypatch.setattr(sampling, "_BIN_WIDTH", 1.0)
    after = assert_cut(logits, params)
    assert torch.equal(torch.stack(before), torch.stack(after))


def draw_slowly(logits: GroupedLogits, row: int, tokens: set[int], seed: int, position: int) -> int:
    ids = torch.tensor(sorted(tokens))
    noise = gumbel_noise(torch.full_like(ids, seed), torch.full_like(ids, position), ids)
    return int(ids[(logits.values[row, ids].double() + noise).argmax()])


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("size", [1, 90, 1000, 40_000])
def test_draws_take_the_largest_sum_over_all_survivors(size: int, scale: float) -> None:
    rows = random_logits(len(PARAMS), size, scale=scale)
    rows[:, 1::3] = -torch.inf
    logits = grouped(rows, size)
    least, last = cut(logits, PARAMS)
    generator = torch.Generator().manual_seed(size)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(PARAMS),), generator=generator)
    positions = torch.randint(0, 5000, (len(PARAMS),), generator=generator)
    drawn = draw(logits, least, last, seeds, positions)
    for row in range(len(PARAMS)):
        tokens = kept(logits, row, least, last)
        assert drawn[row] == draw_slowly(logits, row, tokens, int(seeds[row]), int(positions[row]))
        alone = GroupedLogits(logits.values[row : row + 1], logits.maxima[row : row + 1])
        one = slice(row, row + 1)
        assert torch.equal(draw(alone, least[one], last[one], seeds[one], positions[one]), drawn[one])


def test_draws_have_the_distribution_of_the_logits() -> None:
    """Chi-square over 40,000 draws, likely and unlikely tokens in the same and in different groups."""
    count, size = 40_000, 400
    row = torch.full((size,), -torch.inf)
    tokens = torch.tensor([0, 1, 2, 3, 127, 128, 200, 399])
    row[tokens] = torch.tensor([2.0, 1.5, 0.0, -1.0, 1.0, 2.0, -2.0, 0.5])
    logits = grouped(row.expand(count, size), size)
    least, last = torch.full((count,), -1e30), torch.zeros(count, dtype=torch.int64)
    drawn = draw(logits, least, last, torch.arange(count), torch.zeros(count, dtype=torch.int64))
    expected = row.double().softmax(0)[tokens] * count
    observed = drawn.bincount(minlength=size)
    assert observed.sum() == observed[tokens].sum()
    assert ((observed[tokens] - expected) ** 2 / expected).sum() < 18.5  # 7 degrees of freedom, 1 %


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 50, 128, 129, 1000])
def test_argmax_takes_the_lowest_of_equals_and_finds_nan(dtype: torch.dtype, size: int) -> None:
    logits = random_logits(64, 1100, scale=2.0).to(dtype)
    logits[:, size:] = 100.0  # ids that are not to be looked at
    logits[1, :size] = 0.0
    logits[2, size - 1] = 50.0
    logits[3, size // 2] = torch.nan
    logits[4, size - 1] = torch.nan
    logits[5, :size] = -torch.inf
    ids, values = argmax(logits, size)
    for row in range(64):
        expected = logits[row, :size].float().numpy().argmax()  # the first of equals, and NaN before all
        assert ids[row] == expected
        assert torch.equal(values[row], logits[row, expected]) or row in (3, 4)
    assert values[[3, 4]].isnan().all()
    assert torch.equal(grouped(logits, size).highest[[1, 2, 5]], values[[1, 2, 5]].float())
    assert grouped(logits, size).highest[[3, 4]].isnan().all()


def test_a_bitmask_leaves_the_tokens_whose_bits_are_set() -> None:
    logits = random_logits(3, 70)
    before = logits.clone()
    mask = np.full((3, 3), -1, np.int32)
    mask[1] = 0
    mask[2] = np.array([1 | (1 << 31), 1 << 4, 1], np.uint32).view(np.int32)
    apply_bitmask(logits, torch.from_numpy(mask))
    assert torch.equal(logits[0], before[0])
    assert (logits[1] == -torch.inf).all()
    left = [0, 31, 36, 64]
    assert torch.equal(logits[2, left], before[2, left])
    assert (logits[2] > -torch.inf).sum() == len(left)


parameters = st.tuples(
    st.integers(0, 700),
    st.floats(1e-6, 1.0) | st.sampled_from([1.0, 0.5, 0.25]),
    st.floats(0.0, 1.0, exclude_max=True) | st.just(0.0),
)


@settings(max_examples=50, deadline=None)
@given(
    params=st.lists(parameters, min_size=1, max_size=6),
    size=st.sampled_from([1, 3, 128, 700, 9000]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    levels=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
)
def test_any_rows_equal_the_reference(
    params: list[Params], size: int, scale: float, levels: bool, seed: int, position: int
) -> None:
    rows = random_logits(len(params), size, seed=seed & 0xFFFF, scale=scale)
    logits = grouped(rows.round() if levels else rows, size)
    least, last = assert_cut(logits, params)
    seeds = torch.full((len(params),), seed)
    drawn = draw(logits, least, last, seeds, torch.full_like(seeds, position))
    for row in range(len(params)):
        assert drawn[row] == draw_slowly(logits, row, kept(logits, row, least, last), seed, position)
