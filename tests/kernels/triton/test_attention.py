"""Paged attention in Triton's interpreter against the oracle in float64."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from attention_kit import SCALE, Case, make_case, tree_mask

from trivet_kernels.triton.attention import paged_attention, shape_of
from trivet_kernels.triton.tune import Tile, Tiles, default_tiles

#: decodes of one part and of several, of block and tile boundaries; drafts; prefills, fresh and after a context
MIXED = [(1, 1), (1, 16), (3, 37), (1, 70), (20, 20), (18, 33)]


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (1, False), (17, False), (7, True), (24, True)])
def test_a_mixed_batch(window: int | None, chunked: bool) -> None:
    make_case(MIXED, window=window, chunked=chunked).check()


FEATURES = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 30.0, 0.0])},
    "both": {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 3.0, -torch.inf])},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("window", [None, 17])
def test_soft_caps_and_sinks(features: dict[str, object], window: int | None) -> None:
    make_case([(1, 12), (2, 70), (18, 30)], window=window).check(**features)


@pytest.mark.parametrize("window", [None, 9])
def test_alibi_lowers_scores_by_distance(window: int | None) -> None:
    case = make_case([(1, 70), (20, 30), (2, 5)], window=window)
    slopes = torch.tensor([0.5, 0.25, 0.0, 1.0])
    out = case.run(alibi_slopes=slopes)
    # Two further elements, (p, 1) · (slope, -slope * q), make the same scores by the oracle's means.
    extra = torch.zeros(*case.key_cache.shape[:3], 2)
    for row, seq_len in enumerate(case.seq_lens.tolist()):
        for p in range(seq_len):
            extra[case.block_table[row, p // 4], p % 4] = torch.tensor([p, 1.0])
    positions = torch.cat([torch.arange(69, 70), torch.arange(10, 30), torch.arange(3, 5)])
    bias = torch.stack([slopes.expand(23, 4), -slopes * positions[:, None]], 2) / SCALE
    wide = replace(
        case, query=torch.cat([case.query, bias], 2), key_cache=torch.cat([case.key_cache, extra], 3)
    ).expected()
    torch.testing.assert_close(out.double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 16), (16, 40)]
)
def test_head_sizes(head_dim: int, v_head_dim: int) -> None:
    make_case([(1, 36), (18, 20)], head_dim=head_dim, v_head_dim=v_head_dim, heads=2, kv_heads=1).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (7, 1), (16, 1), (33, 1), (64, 2), (128, 1)])
def test_query_heads_per_key_head(heads: int, kv_heads: int) -> None:
    rows = [(1, 40), (17, 17)] if heads <= 16 else [(1, 40), (2, 3)]
    make_case(rows, heads=heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize("block_size", [1, 3, 16, 48])
@pytest.mark.parametrize("window", [None, 9])
def test_block_sizes(block_size: int, window: int | None) -> None:
    make_case([(1, 70), (30, 41), (1, 2)], block_size=block_size, window=window).check()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
def test_narrower_models(dtype: torch.dtype, tolerance: float) -> None:
    make_case([(1, 60), (25, 40), (4, 20)], dtype=dtype).check(tolerance)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float32, torch.float8_e4m3fn, 1e-5),
        (torch.float32, torch.float8_e5m2, 1e-5),
        (torch.float32, torch.bfloat16, 1e-5),
        (torch.bfloat16, torch.float8_e4m3fn, 1e-2),
    ],
    ids=str,
)
@pytest.mark.parametrize("per_head", [True, False])
def test_narrower_caches_with_scales(
    dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float, per_head: bool
) -> None:
    case = make_case([(1, 60), (20, 30)], dtype=dtype, kv_dtype=kv_dtype)
    scales = {"key_scale": torch.tensor([0.5, 1.5]), "value_scale": torch.tensor([0.8, 0.25])}
    case.check(tolerance, **(scales if per_head else {"key_scale": 0.7, "value_scale": torch.tensor(0.5)}))


TREES = [[-1, 0, 0, 1, -1, 4], [-1, -1, -1], [], [-1, 0, 1, 2, 3]]


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (1, False), (3, False), (11, True)])
def test_trees_of_drafts(window: int | None, chunked: bool) -> None:
    rows = [(1 + len(tree), 9 + 12 * len(tree)) for tree in TREES]
    case = make_case(rows, window=window, chunked=chunked)
    case.tree_lens, case.tree_mask = tree_mask(TREES)
    case.check()


def test_a_long_row_may_end_in_a_tree() -> None:
    case = make_case([(30, 42), (25, 25)], window=9)
    case.tree_lens, case.tree_mask = tree_mask([[-1, 0, 0, 1], []])
    case.check()


def test_rows_without_queries_and_without_context_are_left_out() -> None:
    case = make_case([(1, 5), (20, 26)])
    out = replace(
        case,
        query=torch.cat([case.query, case.query[:3]]),  # padding
        query_start=torch.tensor([0, 0, 1, 1, 21, 21], dtype=torch.int32),
        seq_lens=torch.tensor([0, 5, 0, 26, 90], dtype=torch.int32),
        block_table=case.block_table[[0, 0, 1, 1, 0]],
    ).run()
    torch.testing.assert_close(out[:21].double(), case.expected(), rtol=1e-5, atol=1e-5)
    assert out[21:].isnan().all()


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    # A row of padding: one query in a context of no tokens.
    case = make_case([(1, 5), (1, 40)])
    case.seq_lens = torch.tensor([0, 40], dtype=torch.int32)
    out = case.run()
    assert not out[0].any()
    torch.testing.assert_close(out[1].double(), case.expected()[1], rtol=1e-5, atol=1e-5)


def alone(case: Case, row: int) -> Case:
    first, last = int(case.query_start[row]), int(case.query_start[row + 1])
    return replace(
        case,
        query=case.query[first:last],
        query_start=torch.tensor([0, last - first], dtype=torch.int32),
        seq_lens=case.seq_lens[row : row + 1],
        block_table=case.block_table[row : row + 1],
    )


@pytest.mark.parametrize("window", [None, 17])
def test_a_row_does_not_depend_on_its_batch_or_the_bounds(window: int | None) -> None:
    case = make_case(MIXED, window=window)
    together = case.run()
    for row in range(len(MIXED)):
        own = together[int(case.query_start[row]) : int(case.query_start[row + 1])]
        assert torch.equal(alone(case, row).run(), own)
    assert torch.equal(replace(case, slack=3000).run(), together)


def test_a_row_is_cut_into_no_more_parts_than_there_may_be() -> None:
    tiles = Tiles(Tile(32, 32, 4, 1), Tile(0, 32, 4, 1), min_keys=32)
    most = tiles.max_parts(4)
    assert most * 32 == 2048
    replace(make_case([(1, 2049)], heads=4, kv_heads=4, block_size=64), tiles=tiles).check()


def test_queries_may_be_a_part_of_a_wider_product() -> None:
    case = make_case([(1, 20), (18, 18)])
    fused = torch.randn(19, 8, 16)
    fused[:, 2:6] = case.query
    replace(case, query=fused[:, 2:6]).check()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_row_ends_alone(poison: float) -> None:
    case = make_case([(1, 16), (1, 70), (3, 5), (17, 17)])
    clean = case.run()
    case.key_cache[case.block_table[1, 0]] = poison
    case.value_cache[case.block_table[1, 0]] = poison
    with warnings.catch_warnings(action="ignore"):  # numpy's, of sums that are no numbers
        spoilt = case.run()
    assert not torch.equal(spoilt[1], clean[1])
    spoilt[1] = clean[1]
    assert torch.equal(spoilt, clean)


def test_what_the_kernels_cannot_do_is_refused() -> None:
    case = make_case([(1, 5)])
    given = {"query_start": case.query_start, "seq_lens": case.seq_lens, "block_table": case.block_table}
    given |= {"max_query_len": 1, "max_seq_len": 5}
    with pytest.raises(ValueError, match=r"scale is 0\.0"):
        paged_attention(case.query, case.key_cache, case.value_cache, scale=0.0, **given)
    wide = torch.zeros(2, 4, 2, 320)
    with pytest.raises(ValueError, match="heads of 320 elements"):
        paged_attention(torch.zeros(1, 4, 320), wide, wide, scale=1.0, **given)


def test_default_tiles_serve_a_call_without_any() -> None:
    case = make_case([(1, 300), (20, 20)])
    case.tiles = None  # type: ignore[assignment]
    case.check()
    shape = shape_of(case.query, case.key_cache, case.value_cache)
    assert default_tiles(shape).min_keys < 300
