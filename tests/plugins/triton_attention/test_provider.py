"""The attention provider ``triton`` through its role, in Triton's interpreter on a CPU."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trivet.errors import PluginError
from trivet.roles import AttentionExtras, AttentionMetadata, KVGroup, KVLayout, KVStorage, LayerKVSpec
from trivet_kernels.reference.oracle import paged_attention_oracle
from trivet_kernels.triton import measure as measure_module
from trivet_kernels.triton.tune import Shape, Tile, Tiles
from trivet_triton_attention import attention as module
from trivet_triton_attention.attention import TritonAttention
from trivet_triton_attention.options import TritonAttentionOptions
from trivet_triton_attention.plugin import trivet_providers

BLOCK, BLOCKS = 4, 12


def spec(layer: int, **changes: object) -> LayerKVSpec:
    given = {"kind": "full", "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"} | changes
    return LayerKVSpec(layer=layer, **given)


def build(
    specs: list[LayerKVSpec], storage: list[tuple[int, ...]] | None = None, device: str = "cpu", **options: bool
) -> TritonAttention:
    layers = tuple(range(len(specs)))
    attention = TritonAttention(SimpleNamespace(device=device), TritonAttentionOptions(**options))
    attention._context.device = "cpu"
    attention.allocate(
        KVLayout(
            specs=tuple(specs),
            groups=(KVGroup(0, layers, "full", BLOCK),),
            storage=tuple(KVStorage(of, BLOCKS) for of in storage or [(layer,) for layer in layers]),
        )
    )
    return attention


def metadata(rows: list[tuple[int, int, list[int]]]) -> AttentionMetadata:
    """``rows``: queries, context length, blocks."""
    counts = torch.tensor([0] + [count for count, _, _ in rows])
    table = torch.zeros(len(rows), max(len(blocks) for _, _, blocks in rows), dtype=torch.int32)
    places = []
    for row, (count, seq_len, blocks) in enumerate(rows):
        table[row, : len(blocks)] = torch.tensor(blocks)
        positions = torch.arange(seq_len - count, seq_len)
        places.append(table[row, positions // BLOCK].long() * BLOCK + positions % BLOCK)
    return AttentionMetadata(
        group=0,
        block_size=BLOCK,
        query_start=counts.cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len, _ in rows], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(places),
        max_query_len=max(count for count, _, _ in rows),
        max_seq_len=max(seq_len for _, seq_len, _ in rows),
    )


def tokens(count: int, heads: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(count, heads, 16, generator=torch.Generator().manual_seed(seed))


def oracle(attention: TritonAttention, layer: int, query: Tensor, meta: AttentionMetadata, **extras: object) -> Tensor:
    return paged_attention_oracle(
        query,
        *attention.kv(layer),
        query_start=meta.query_start,
        seq_lens=meta.seq_lens,
        block_table=meta.block_table,
        scale=0.5,
        **extras,
    )


def test_a_prefill_and_the_decodes_after_it() -> None:
    attention = build([spec(0)])
    steps = [
        [(18, 18, [3, 7, 1, 9, 2]), (3, 3, [5])],
        [(1, 19, [3, 7, 1, 9, 2]), (1, 4, [5])],
        [(2, 21, [3, 7, 1, 9, 2, 4]), (1, 5, [5, 11])],
    ]
    for number, rows in enumerate(steps):
        meta = metadata(rows)
        attention.prepare(meta)
        total = len(meta.slot_mapping)
        query, key, value = (tokens(total, heads, 3 * number + i) for i, heads in enumerate((4, 2, 2)))
        out = attention.forward(0, query, key, value, meta, scale=0.5)
        key_cache, value_cache = attention.kv(0)
        assert torch.equal(key_cache.view(-1, 2, 16)[meta.slot_mapping], key)
        assert torch.equal(value_cache.view(-1, 2, 16)[meta.slot_mapping], value)
        torch.testing.assert_close(out, oracle(attention, 0, query, meta), rtol=1e-5, atol=1e-6)


def test_what_layers_ask_for_reaches_the_kernel() -> None:
    attention = build([spec(0), spec(1, kind="chunked", window=3), spec(2, dtype="fp8_e4m3")], [(0, 1), (2,)])
    meta = metadata([(5, 9, [1, 2, 3])])
    query, key, value = 3 * tokens(5, 4, 1), tokens(5, seed=2), tokens(5, seed=3)
    for cache in (*attention.kv(0), *attention.kv(1)):
        cache.normal_(generator=torch.Generator().manual_seed(4))
    plain = attention.forward(0, query, key, value, meta, scale=0.5)
    sinks = torch.tensor([1.0, 2.0, -1.0, 0.0])
    for layer, asked, of_oracle in (
        (0, {"softcap": 0.5}, {"softcap": 0.5}),
        (0, {"sinks": sinks}, {"sinks": sinks}),
        (0, {"window": 3}, {"window": 3}),
        (1, {"window": 3}, {"window": 3, "chunked": True}),
        (2, {"extras": AttentionExtras(key_scale=0.5, value_scale=0.25)}, {"key_scale": 0.5, "value_scale": 0.25}),
    ):
        out = attention.forward(layer, query, key, value, meta, scale=0.5, **asked)
        torch.testing.assert_close(out, oracle(attention, layer, query, meta, **of_oracle), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(out, plain, atol=1e-3)
    slopes = AttentionExtras(alibi_slopes=torch.full((4,), 50.0))
    out = attention.forward(0, query, key, value, meta, scale=0.5, extras=slopes)
    torch.testing.assert_close(out, value.repeat_interleave(2, 1), rtol=1e-4, atol=1e-4)  # no further than themselves


def test_a_tree_is_prepared_into_the_tensors_that_a_graph_may_have_captured() -> None:
    attention = build([spec(0)])
    meta = metadata([(4, 9, [1, 2, 3])])
    query, key, value = tokens(4, 4, 1), tokens(4, seed=2), tokens(4, seed=3)
    meta.tree_lens = torch.tensor([3], dtype=torch.int32)
    meta.tree_mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    attention.prepare(meta)
    captured = meta.prepared
    for mask in ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]):
        meta.tree_mask = torch.tensor([mask], dtype=torch.bool)
        attention.prepare(meta)
        assert meta.prepared is captured
        out = attention.forward(0, query, key, value, meta, scale=0.5)
        expected = oracle(attention, 0, query, meta, tree_lens=meta.tree_lens, tree_mask=meta.tree_mask)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_neither_preparing_nor_attending_reads_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would wait for a device, or make a captured graph wrong. The launches themselves are left out: on a CPU the
    interpreter does read."""
    attention = build([spec(0)])
    meta = metadata([(18, 18, [3, 7, 1, 9, 2]), (1, 4, [5])])
    query, key, value = tokens(19, 4, 1), tokens(19, seed=2), tokens(19, seed=3)
    launched = []

    def stand_in(name: str) -> object:
        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> object:
                assert all(type(size) is int and size > 0 for size in grid)
                return lambda *args, **kwargs: launched.append(name)

        return Kernel()

    def refuse(*args: object) -> None:
        raise AssertionError("a tensor was read")

    from trivet_kernels.triton import attention as kernels
    from trivet_kernels.triton import cache

    for owner, name in ((kernels, "prefill_kernel"), (kernels, "decode_kernel"), (cache, "write_kernel")):
        monkeypatch.setattr(owner, name, stand_in(name))
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(Tensor, name, refuse)
    attention.prepare(meta)
    attention.forward(0, query, key, value, meta, scale=0.5)
    assert launched == ["write_kernel", "write_kernel", "prefill_kernel", "decode_kernel"]


def test_blocks_and_tokens_are_moved_in_every_layer() -> None:
    attention = build([spec(0), spec(1)], [(0, 1)])
    caches = [*attention.kv(0), *attention.kv(1)]
    for cache in caches[:2]:
        cache.normal_()
    first, second = (caches[0][block].clone() for block in (1, 2))
    attention.copy_blocks(0, torch.tensor([[1, 3]], dtype=torch.int32))
    attention.move_tokens(0, torch.tensor([8]), torch.tensor([17]))
    attention.zero_blocks(0, torch.tensor([1], dtype=torch.int32))
    for layer in (0, 1):
        keys, _ = attention.kv(layer)
        assert not keys[1].any()
        assert torch.equal(keys[3], first)
        assert torch.equal(keys[4, 1], second[0])


def test_tiles_are_measured_once_per_class_of_shapes_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a device that is named but not there: what is measured is another's matter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "runs_here", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    measured, used = [], []
    found = Tiles(Tile(16, 16, 4, 1), Tile(0, 16, 4, 1), min_keys=16)

    def measure(shape: Shape, block_size: int, device: torch.device) -> Tiles:
        measured.append((shape.windowed, block_size, device))
        return found

    def attend(query: Tensor, *args: Any, tiles: Tiles, **given: Any) -> Tensor:
        used.append(tiles)
        return query

    monkeypatch.setattr(measure_module, "measured_tiles", measure)
    monkeypatch.setattr(module, "paged_attention", attend)
    meta = metadata([(2, 2, [1])])
    query, key, value = tokens(2, 4, 1), tokens(2, seed=2), tokens(2, seed=3)

    def run(attention: TritonAttention) -> None:
        for layer, window in ((0, None), (1, None), (0, 3), (0, None)):
            attention.forward(layer, query, key, value, meta, scale=0.5, window=window)

    capturing = True
    build_two = functools.partial(build, [spec(0), spec(1)], [(0,), (1,)], device="cuda")
    run(build_two(autotune=True))
    assert not measured, "a graph is being recorded, which nothing may be measured in"
    assert found not in used
    capturing = False
    used.clear()
    run(build_two(autotune=True))
    assert measured == [(False, BLOCK, torch.device("cpu")), (True, BLOCK, torch.device("cpu"))]
    run(build_two(autotune=True))
    assert len(measured) == 2, "what was measured by another provider is in the file"
    assert used == [found] * 8
    used.clear()
    run(build_two(autotune=False))
    assert len(measured) == 2
    assert found not in used


def test_support_says_what_it_serves() -> None:
    attention = build([spec(0)])
    assert attention.support(spec(0, needs=("alibi_slopes", "key_scale"))).problem is None
    assert "heads of 320 elements" in (attention.support(spec(0, head_dim=320)).problem or "")
    assert "heads of 512 elements" in (attention.support(spec(0, v_head_dim=512)).problem or "")
    assert "needs unheard_of" in (attention.support(spec(3, needs=("unheard_of",))).problem or "")
    assert attention.capturable


def test_without_a_gpu_or_the_interpreter_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "runs_here", lambda device: False)
    with pytest.raises(PluginError, match=r"'cpu'.*TRITON_INTERPRET=1"):
        build([spec(0)])


def suitability(device: str) -> tuple[int | None, str]:
    (provider,) = trivet_providers()
    assert provider.suits is not None
    answer = provider.suits(SimpleNamespace(config=SimpleNamespace(device=device)))
    return answer.rank, answer.reason


def test_it_suits_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suitability("cuda:1")[0] is not None
    assert suitability("cpu") == (None, "its kernels are for CUDA and ROCm devices, and the device is cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert suitability("cuda") == (None, "Triton is not installed; the extra trivet[triton] brings it")


def test_offering_it_imports_neither_torch_nor_triton() -> None:
    script = (
        "import sys; from types import SimpleNamespace as N; from trivet_triton_attention import plugin, options\n"
        "offer, = plugin.trivet_providers(); print(offer.suits(N(config=N(device='cuda'))).rank)\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    assert int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout) > 50
