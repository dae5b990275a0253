"""The attention provider ``cpu``: its role's suite, and when the reference takes over from the kernel."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trivet.roles import AttentionExtras, AttentionMetadata, KVGroup, KVLayout, KVStorage, LayerKVSpec
from trivet.testing.suites import AttentionSuite
from trivet_cpu_attention import plugin
from trivet_cpu_attention.attention import CpuAttention
from trivet_kernels.cpu import build
from trivet_kernels.cpu.attention import CachedAttention
from trivet_torch.paged_attention import PagedAttention
from trivet_torch.testing import TorchArrays

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
BLOCK, BLOCKS = 4, 16
#: queries, context, blocks
ROWS = [(1, 7, [3, 9]), (5, 5, [1, 2]), (2, 18, [4, 5, 6, 7, 8])]


class TestCpu(TorchArrays, AttentionSuite):
    use = "cpu"
    shapes = (*AttentionSuite.shapes, (2, 2, 8, 6), (7, 1, 33, 17), (32, 2, 64, None))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that finds none."""
    build._build_and_load.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    build._build_and_load.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every call of the kernel."""
    made: list[object] = []
    run = CachedAttention.__call__

    def note(self: CachedAttention, *args: Any, **given: Any) -> Tensor:
        made.append(given)
        return run(self, *args, **given)

    monkeypatch.setattr(CachedAttention, "__call__", note)
    return made


def build_provider(kind: type[PagedAttention], dtype: str = "float32", **changes: Any) -> PagedAttention:
    given = {"kind": "full", "num_kv_heads": 2, "head_dim": 8, "dtype": dtype} | changes
    provider = kind(SimpleNamespace(device="cpu"))
    spec = LayerKVSpec(layer=0, **given)
    assert provider.support(spec).problem is None
    group = KVGroup(0, (0,), given["kind"], BLOCK)
    provider.allocate(KVLayout(specs=(spec,), groups=(group,), storage=(KVStorage((0,), BLOCKS),)))
    return provider


def metadata() -> AttentionMetadata:
    counts = torch.tensor([0] + [count for count, _, _ in ROWS])
    table = torch.zeros(len(ROWS), 5, dtype=torch.int32)
    places = []
    for row, (count, seq_len, blocks) in enumerate(ROWS):
        table[row, : len(blocks)] = torch.tensor(blocks)
        positions = torch.arange(seq_len - count, seq_len)
        places.append(table[row, positions // BLOCK].long() * BLOCK + positions % BLOCK)
    return AttentionMetadata(
        group=0,
        block_size=BLOCK,
        query_start=counts.cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len, _ in ROWS], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(places),
        max_query_len=5,
        max_seq_len=18,
    )


def run(provider: PagedAttention, meta: AttentionMetadata, dtype: torch.dtype = torch.float32, **given: Any) -> Tensor:
    """Attend twice in a step, as two layers do, over a cache that is filled first."""
    g = torch.Generator().manual_seed(1)
    for cache in provider.kv(0):
        cache.copy_(torch.randn(cache.shape, generator=g))
    query, key, value = (torch.randn(8, heads, 8, generator=g).to(dtype) for heads in (4, 2, 2))
    provider.prepare(meta)
    first = provider.forward(0, query, key, value, meta, scale=0.5, **given)
    assert torch.equal(provider.forward(0, query, key, value, meta, scale=0.5, **given), first)
    return first


def compare(dtype: torch.dtype = torch.float32, cache: str = "float32", tree: bool = False, **given: Any) -> None:
    metas = [metadata(), metadata()]
    if tree:
        for meta in metas:
            meta.tree_lens = torch.tensor([0, 2, 0], dtype=torch.int32)
            meta.tree_mask = torch.eye(2, dtype=torch.bool).repeat(3, 1, 1)
    outs = [
        run(build_provider(kind, cache), meta, dtype, **given)
        for kind, meta in zip((CpuAttention, PagedAttention), metas, strict=True)
    ]
    tolerance = 1e-5 if dtype is torch.float32 else 1.5e-2
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", [{}, {"window": 3}, {"softcap": 2.0}, {"sinks": torch.arange(4.0)}], ids=str)
def test_the_kernel_serves_models_and_caches_of_one_type(
    dtype: str, given: dict[str, Any], calls: list[object]
) -> None:
    compare(getattr(torch, dtype), dtype, **given)
    assert len(calls) == 2


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "cache", "given"),
    [
        ("float16", "float16", {}),
        ("float32", "bfloat16", {}),
        ("bfloat16", "float32", {}),
        ("float32", "fp8_e4m3", {}),
        ("float32", "float32", {"extras": AttentionExtras(key_scale=2.0, value_scale=0.5)}),
        ("float32", "float32", {"tree": True}),
    ],
)
def test_the_reference_serves_the_rest(dtype: str, cache: str, given: dict[str, Any], calls: list[object]) -> None:
    compare(getattr(torch, dtype), cache, **given)
    assert not calls


@needs_compiler
def test_a_layer_that_needs_the_reference_leaves_the_step_to_the_kernel_for_others(calls: list[object]) -> None:
    provider, meta = build_provider(CpuAttention), metadata()
    plain = run(provider, meta)
    scaled = run(provider, meta, extras=AttentionExtras(key_scale=2.0))
    assert len(calls) == 2
    assert not torch.allclose(plain, scaled)
    assert torch.equal(run(provider, meta), plain)
    assert len(calls) == 4


@needs_compiler
def test_a_step_that_was_not_prepared() -> None:
    provider, meta = build_provider(CpuAttention), metadata()
    expected = run(provider, meta)
    meta.prepared = None
    query, key, value = (torch.zeros(8, heads, 8) for heads in (4, 2, 2))
    assert provider.forward(0, query, key, value, meta, scale=0.5).shape == expected.shape


def test_without_a_compiler_the_reference_serves_all(
    no_compiler: None, calls: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trivet.kernels"):
        compare()
        compare(torch.bfloat16, "bfloat16", window=3)
    assert not calls
    assert len(caplog.records) == 1


SLOPES = torch.tensor([0.5, 0.25, 0.125, 2.0])


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "cache", "given", "native"),
    [
        ("float32", "float32", {}, True),
        ("float32", "float32", {"softcap": 2.0, "window": 3}, True),
        ("float32", "float32", {"tree": True}, False),
        ("float32", "float32", {"tree": True, "window": 2}, False),
        ("bfloat16", "bfloat16", {"tree": True}, False),
        ("float16", "float16", {}, False),
        ("float32", "bfloat16", {}, False),
        ("bfloat16", "fp8_e4m3", {}, False),
    ],
)
def test_slopes_are_served_by_the_kernel_or_the_reference(
    dtype: str, cache: str, given: dict[str, Any], native: bool, calls: list[object]
) -> None:
    compare(getattr(torch, dtype), cache, extras=AttentionExtras(alibi_slopes=SLOPES), **given)
    assert bool(calls) is native
    meta, case = metadata(), build_provider(CpuAttention, cache, needs=("alibi_slopes",))
    sloped = run(case, meta, getattr(torch, dtype), extras=AttentionExtras(alibi_slopes=SLOPES))
    assert not torch.allclose(sloped, run(case, meta, getattr(torch, dtype)), atol=0.1)


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"needs": ("rotations",)}, "rotations"),
        ({"kind": "recurrent"}, "recurrent"),
    ],
)
def test_what_is_not_served_is_said(changes: dict[str, Any], lacking: str) -> None:
    given = {"kind": "full", "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"} | changes
    assert lacking in (CpuAttention(SimpleNamespace(device="cpu")).support(LayerKVSpec(0, **given)).problem or "")


def test_auto_takes_it_on_a_cpu_with_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (provider,) = plugin.trivet_providers()
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "cc").write_text("")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    answer = provider.suits(SimpleNamespace(config=SimpleNamespace(device="cpu")))
    assert answer.rank is not None
    assert answer.rank > 10
    assert "cc" in answer.reason
    cuda = provider.suits(SimpleNamespace(config=SimpleNamespace(device="cuda:1")))
    assert cuda.rank is None
    assert "cuda" in cuda.reason
    monkeypatch.setenv("PATH", str(tmp_path))
    none = provider.suits(SimpleNamespace(config=SimpleNamespace(device="cpu")))
    assert none.rank is None
    assert "no C compiler" in none.reason


def test_the_compilers_are_those_of_the_kernels() -> None:
    assert plugin._COMPILERS == build._COMPILERS
