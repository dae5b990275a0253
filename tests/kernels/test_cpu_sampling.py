"""The native kernels of sampling have the results of the plain ones, bit for bit, whatever instructions they use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivet_kernels.cpu import build
from trivet_kernels.cpu.build import library, problem
from trivet_kernels.cpu.levels import Level, usable_levels
from trivet_kernels.cpu.sampling import NativeSampling
from trivet_kernels.reference import sampling as reference
from trivet_kernels.sampling import DrawParams, argmax

#: those that make a difference here
LEVELS = [level for level in usable_levels() if level.name in {"avx512_bf16", "avx512", "avx2", "generic"}]


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


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("broken", [None, torch.nan, torch.inf, -torch.inf], ids=str)
def test_the_likeliest_ids_alone_unless_a_row_has_none(
    native: NativeSampling, narrow: bool, broken: float | None
) -> None:
    whole = torch.randn(9, 2509).mul(3).round().to(torch.bfloat16 if narrow else torch.float32)  # many equals
    whole[:, 2501:] = torch.nan  # beyond what counts
    logits = whole[:, 1:]
    if broken is not None:
        logits[4, : 2500 if broken == -torch.inf else 1] = broken
    found = native.likeliest(logits, 2500)
    if broken is None:
        assert found is not None
        assert found.tolist() == reference.argmax(logits, 2500)[0].tolist()
    else:
        assert found is None


@pytest.mark.parametrize("size", [0, 6])
def test_sizes_beyond_the_logits_are_refused(native: NativeSampling, size: int) -> None:
    with pytest.raises(ValueError, match=rf"size must be in \[1, 5\].*not {size}"):
        native.argmax(torch.zeros(2, 5), size)


def test_every_device_has_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    ids, values = argmax(logits, 3)
    assert (ids.item(), values.item()) == (1, 3.0)
    assert argmax(logits.to("meta")[:, :3], 3)[0].shape == (1,)


# ---------------------------------------------------------------- draws, logprobs, copies


@pytest.fixture(scope="module", params=LEVELS, ids=lambda level: level.name)
def leveled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeSampling:
    if build.compiler() is None:
        pytest.skip("no compiler")
    level: Level = request.param
    folder: Path = tmp_path_factory.getbasetemp().parent / "kernels"
    return NativeSampling(build.load(build.build([level], folder)))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


ROWS = 24


def parameters(seed: int) -> DrawParams:
    rng = np.random.default_rng(seed)
    return DrawParams(
        rng.choice([0, 0.3, 0.8, 1, 1.7, 2], ROWS).astype(np.float32),
        rng.choice([0, 0, 1, 5, 40, 300, 3000, 10**9], ROWS),
        rng.choice([1, 1, 0.95, 0.5, 0.9999, 1e-4], ROWS),
        rng.choice([0, 0, 0.05, 0.5, 0.999], ROWS),
        rng.integers(-(2**63), 2**63 - 1, ROWS),
        rng.integers(0, 5000, ROWS),
    )


def logits_of(seed: int, size: int, scale: float, dtype: torch.dtype, *, levels: bool = False) -> Tensor:
    logits = torch.randn(ROWS, size + 9, generator=torch.Generator().manual_seed(seed)) * scale
    logits = logits.round() if levels else logits
    logits[3, ::2] = -torch.inf
    logits[5, size // 2] = torch.nan
    logits[6] = -torch.inf
    logits[7, size - 1] = torch.inf
    logits[:, size:] = 100.0  # ids that are not to be drawn
    return logits.to(dtype)


def assert_draws(native: NativeSampling, logits: Tensor, changed: Tensor | None, size: int, params: DrawParams) -> None:
    """The tokens and largest logits of the reference; every third row is drawn from ``changed``, if that is given."""
    source = np.arange(ROWS)
    rows = logits.float()
    if changed is not None:
        source[::3] = ~np.arange(len(source[::3]))
        rows[::3] = changed
    ids, highest = native.draw(logits, changed, source, size, params)
    greedy = params.temperature == 0
    want = torch.zeros(ROWS, dtype=torch.int64)
    want_highest = torch.zeros(ROWS)
    at = torch.from_numpy(greedy)
    want[at], want_highest[at] = reference.argmax(rows[at], size)
    others = params.at(np.flatnonzero(~greedy))
    want[~at], want_highest[~at] = reference.sample(rows[~at], size, *(torch.from_numpy(x) for x in others))
    np.testing.assert_array_equal(highest, want_highest.numpy())
    sound = np.isfinite(highest)
    assert sound.sum() >= ROWS - 3 - (size == 1)
    np.testing.assert_array_equal(ids[sound], want.numpy()[sound])


@pytest.mark.parametrize("size", [1, 100, 128, 129, 5000, 30_000])
@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 6.0])
def test_draws_are_the_references_at_every_level(leveled: NativeSampling, size: int, scale: float) -> None:
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        logits = logits_of(seed, size, scale, dtype, levels=seed == 1)
        assert_draws(leveled, logits, None, size, parameters(seed + size))


@pytest.mark.usefixtures("threads")
def test_changed_rows_and_threads_make_no_difference(native: NativeSampling) -> None:
    logits, params = logits_of(1, 3000, 3.0, torch.bfloat16), parameters(4)
    changed = torch.randn(ROWS // 3, 3009)
    assert_draws(native, logits, changed, 3000, params)
    many = native.draw(logits, None, np.arange(ROWS), 3000, params)
    for row in range(ROWS):
        ids, highest = native.draw(logits, None, np.array([row]), 3000, params.at(np.array([row])))
        assert ids[0] == many[0][row]
        np.testing.assert_array_equal(highest, many[1][[row]])


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([1, 7, 128, 300, 1000, 9000]),
    scale=st.sampled_from([0.0, 0.02, 0.5, 3.0, 20.0]),
    seed=st.integers(0, 2**31),
    levels=st.booleans(),
    narrow=st.booleans(),
)
def test_any_draws_are_the_references(size: int, scale: float, seed: int, levels: bool, narrow: bool) -> None:
    found = library()
    if found is None:
        pytest.skip(f"no native kernels: {problem()}")
    logits = logits_of(seed, size, scale, torch.bfloat16 if narrow else torch.float32, levels=levels)
    assert_draws(NativeSampling(found), logits, None, size, parameters(seed))


@pytest.mark.parametrize("count", [0, 1, 20, 1000])
@pytest.mark.parametrize("size", [1000, 1003, 20_000])
def test_logprobs_ids_and_ranks(leveled: NativeSampling, dtype: torch.dtype, size: int, count: int) -> None:
    if dtype == torch.float16:
        assert not leveled.serves(torch.zeros(1, 9, dtype=dtype))
        return
    logits = torch.randn(5, size + 70).mul(3).to(dtype)
    logits[1, 10] = 40.0
    logits[2, size + 3] = 30.0  # takes most of the probability, and is not listed
    tokens = np.array([0, 11, 5, size - 1, 17])
    rows = np.array([0, 1, 2, 4, 4])
    ids, values, ranks = leveled.logprobs(logits, rows, tokens, count, size)
    want_ids, want, want_ranks = reference.logprobs(
        logits[torch.from_numpy(rows)], torch.from_numpy(tokens), count, size
    )
    np.testing.assert_array_equal(ids, want_ids.numpy())
    np.testing.assert_array_equal(ranks, want_ranks.numpy())
    np.testing.assert_allclose(values, want.numpy(), rtol=2e-6, atol=2e-6)
    exact = logits.double().log_softmax(1)[torch.from_numpy(rows)[:, None], torch.from_numpy(ids).long()]
    np.testing.assert_allclose(values, exact.numpy(), rtol=1e-6, atol=1e-6)


def test_logprobs_of_masked_and_broken_rows(leveled: NativeSampling) -> None:
    logits = torch.full((3, 700), -torch.inf)
    logits[0, [9, 300]] = 1.0
    logits[1, 650] = torch.nan
    ids, values, ranks = leveled.logprobs(logits, np.arange(3), np.array([300, 4, 4]), 3, 600)
    assert ids[0].tolist() == [300, 9, 300, 0]
    np.testing.assert_allclose(values[0], [-np.log(2)] * 3 + [-np.inf], rtol=1e-6)
    assert ranks[0] == 1
    assert np.isnan(values[1:]).all()


@pytest.mark.parametrize("width", [1, 31, 64, 1000])
def test_float_copies_with_and_without_masks(leveled: NativeSampling, width: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(6, width + 5)[:, 2 : 2 + width].to(dtype)
        rows = np.array([4, 0, 4])
        out = torch.full((4, width), 7.0)
        leveled.float_rows(logits, rows, None, out)
        assert torch.equal(out[:3], logits[torch.from_numpy(rows)].float())
        assert (out[3] == 7.0).all()
        bits = torch.randint(-(2**31), 2**31 - 1, (3, -(-width // 32)), dtype=torch.int64).int()
        bits[2] = -1
        want = out[:3].clone()
        reference.apply_bitmask(want, bits)
        leveled.float_rows(logits, rows, bits, out)
        assert torch.equal(out[:3], want)
