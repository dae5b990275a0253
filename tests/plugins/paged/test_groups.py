"""Which layers share a table, and how much memory a block takes."""

from __future__ import annotations

from typing import Any

import pytest

from trivet.errors import CacheMemoryError
from trivet.roles import AttentionSupport, CacheRequirements, KVGroup, LayerKVSpec
from trivet_paged.cache import PagedCache
from trivet_paged.groups import Group, plan_groups
from trivet_paged.options import PagedOptions


def layer(index: int, window: int | None = None, heads: int = 1, kind: str | None = None) -> LayerKVSpec:
    chosen: Any = kind or ("full" if window is None else "sliding")
    return LayerKVSpec(index, chosen, heads, 64, "bfloat16", window)


def gemma(num_layers: int, window: int = 512) -> list[LayerKVSpec]:
    """Every sixth layer keeps all tokens."""
    return [layer(i, None if i % 6 == 5 else window) for i in range(num_layers)]


def plan(specs: list[LayerKVSpec], block_size: int = 16, **support: Any) -> Any:
    return plan_groups(specs, [AttentionSupport(**support) for _ in specs], block_size)


def test_gemma_3_270m_has_six_groups_of_three_layers_in_three_buffers() -> None:
    made = plan(gemma(18))
    assert [len(g.kv.layers) for g in made.groups] == [3] * 6
    assert [g.kv.kind for g in made.groups].count("full") == 1
    assert len(made.buffers) == 3
    assert sorted(layer for buffer in made.buffers for layer in buffer) == list(range(18))
    assert all(len(buffer) == 6 for buffer in made.buffers)
    one = layer(0).bytes_per_token
    assert made.page_bytes == 3 * 16 * one, "a block of any group is a page of three layers"


def test_26_layers_of_which_four_keep_all_tokens_waste_little() -> None:
    made = plan(gemma(26))
    kinds = [(g.kv.kind, len(g.kv.layers)) for g in made.groups]
    assert sum(count for kind, count in kinds if kind == "full") == 4
    assert sum(count for kind, count in kinds if kind == "sliding") == 22
    assert all(kind in {"full", "sliding"} for kind, _ in kinds)
    pages = len(made.groups) * len(made.buffers)
    assert pages - 26 <= 2, "hardly any group lacks layers"
    assert len(made.groups) <= 14


def test_layers_of_one_kind_are_one_group_with_a_buffer_each() -> None:
    for window in (None, 100):
        made = plan([layer(i, window) for i in range(5)])
        assert [g.kv.layers for g in made.groups] == [(0, 1, 2, 3, 4)]
        assert made.buffers == ((0,), (1,), (2,), (3,), (4,))
        assert made.page_bytes == 5 * 16 * layer(0).bytes_per_token


def test_layers_with_fewer_bytes_per_token_get_longer_blocks() -> None:
    specs = [layer(0, heads=4), layer(1, 32, heads=2), layer(2, heads=4), layer(3, 32, heads=2)]
    made = plan(specs)
    assert {g.kv.kind: (g.factor, g.size) for g in made.groups} == {"full": (1, 16), "sliding": (2, 32)}
    assert made.page_bytes == len(made.buffers) * 16 * specs[0].bytes_per_token, "every page is full"
    assert made.alignment == 32


def test_blocks_are_no_longer_than_attention_can_do() -> None:
    specs = [layer(0, heads=4), layer(1, 32, heads=2)]
    made = plan(specs, block_size_max=16)
    assert [g.size for g in made.groups] == [16, 16]


def test_bytes_that_do_not_divide_share_blocks_of_one_size() -> None:
    specs = [layer(0, heads=3), layer(1, 32, heads=2)]
    assert [g.size for g in plan(specs).groups] == [16, 16]


def test_a_recurrent_state_is_refused_by_name() -> None:
    with pytest.raises(CacheMemoryError, match="layer 1 keeps a recurrent state"):
        plan([layer(0), layer(1, kind="recurrent")])


@pytest.mark.parametrize(
    "specs",
    [
        gemma(18),
        gemma(26),
        [layer(i) for i in range(4)],
        [layer(0, heads=4), layer(1, 32, heads=2), layer(2, heads=2), layer(3, 32, heads=4)],
        [layer(0, heads=3), layer(1, 32, heads=2), layer(2, 64, 1, "chunked")],
    ],
    ids=["18", "26", "full", "mixed", "three kinds"],
)
def test_a_block_takes_its_share_of_all_buffers(specs: list[LayerKVSpec]) -> None:
    support = tuple(AttentionSupport() for _ in specs)
    need = CacheRequirements(tuple(specs), support, 1 << 30, 1024, 4)
    cache = PagedCache(None, PagedOptions(block_size=16, num_blocks=500))
    layout = cache.configure(need)
    assert layout.num_bytes % 500 == 0
    assert plan(specs).page_bytes == layout.num_bytes // 500
    sizes = {one: group.block_size for group in layout.groups for one in group.layers}
    tokens = {spec.layer: spec.bytes_per_token for spec in specs}
    for storage in layout.storage:
        widest = max(tokens[one] * sizes[one] for one in storage.layers)
        assert all(tokens[one] * sizes[one] <= widest for one in storage.layers)


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 4, 7])
def test_the_first_block_of_a_window_is_the_one_that_the_next_token_sees(kind: Any, size: int, window: int) -> None:
    group = Group(KVGroup(0, (0,), kind, size, None if kind == "full" else window), 1)
    for done in range(30):
        if kind == "full":
            first = 0
        elif kind == "sliding":
            first = max(0, done - window + 1)
        else:
            first = done - done % window
        assert group.first_block(done) == first // size


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_no_request_ever_has_more_blocks_than_planned(kind: Any, size: int) -> None:
    window, in_flight = 7, 5
    group = Group(KVGroup(0, (0,), kind, size, window), 1)
    most = 0
    for done in range(60):
        for count in range(1, in_flight + 1):
            blocks = -(-(done + count) // size) - group.first_block(done)
            most = max(most, blocks)
            assert blocks <= group.most_blocks(done + count, in_flight)
    assert most == group.most_blocks(10_000, in_flight) or kind == "chunked", "and the bound is met"
