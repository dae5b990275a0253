"""A KV cache narrower than the model: rounding within bounds, saturation, scales, and the same result however cut."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trivet.roles import AttentionExtras, AttentionMetadata, KVGroup, KVLayout, KVStorage, LayerKVSpec
from trivet_kernels.reference.oracle import paged_attention_oracle
from trivet_torch_attention.attention import TorchAttention

BLOCK, BLOCKS, HEADS, DIM = 4, 40, 2, 8
NARROW = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FP8 = ["fp8_e4m3", "fp8_e5m2"]


def build(*dtypes: str, kind: str = "full", window: int | None = None, shared: bool = False) -> TorchAttention:
    """One layer and group per type; ``shared``: in one buffer, so that pages of different sizes lie apart."""
    layers = tuple(range(len(dtypes)))
    specs = tuple(LayerKVSpec(layer, kind, HEADS, DIM, dtype, window) for layer, dtype in enumerate(dtypes))
    storage = [layers] if shared else [(layer,) for layer in layers]
    attention = TorchAttention(SimpleNamespace(device="cpu"))
    attention.allocate(
        KVLayout(
            specs,
            tuple(KVGroup(layer, (layer,), kind, BLOCK, window) for layer in layers),
            tuple(KVStorage(of, BLOCKS) for of in storage),
        )
    )
    return attention


def metadata(count: int, seq_len: int, blocks: Tensor) -> AttentionMetadata:
    """One row: ``count`` new tokens at the end of a context of ``seq_len``."""
    positions = torch.arange(seq_len - count, seq_len)
    return AttentionMetadata(
        group=0,
        block_size=BLOCK,
        query_start=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_table=blocks[None],
        slot_mapping=blocks[positions // BLOCK].long() * BLOCK + positions % BLOCK,
        max_query_len=count,
        max_seq_len=seq_len,
    )


def table(seed: int = 0) -> Tensor:
    """All blocks but the null block, in some order."""
    return (torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(seed)) + 1).int()


def inputs(count: int, seed: int = 0, *, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(count, groups * HEADS, DIM, generator=g)
    return query, torch.randn(count, HEADS, DIM, generator=g), torch.randn(count, HEADS, DIM, generator=g)


def run(
    attention: TorchAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunk: int,
    layer: int = 0,
    blocks: Tensor | None = None,
    window: int | None = None,
    extras: AttentionExtras | None = None,
) -> Tensor:
    """The whole prompt, ``chunk`` tokens a step."""
    blocks = table() if blocks is None else blocks
    out = []
    for begin in range(0, len(query), chunk):
        part = slice(begin, min(begin + chunk, len(query)))
        meta = metadata(part.stop - begin, part.stop, blocks)
        attention.prepare(meta)
        out.append(
            attention.forward(layer, query[part], key[part], value[part], meta, scale=0.3, window=window, extras=extras)
        )
    return torch.cat(out)


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in float64 over the keys and values as the model made them."""
    wide = [x.double() for x in (query, key[:, None], value[:, None])]
    return paged_attention_oracle(
        *wide,
        query_start=torch.tensor([0, len(query)]),
        seq_lens=torch.tensor([len(query)]),
        block_table=torch.arange(len(query))[None],
        scale=0.3,
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_the_error_is_that_of_rounding_keys_and_values_once(dtype: str) -> None:
    query, key, value = inputs(50)
    info = torch.finfo(NARROW[dtype])
    # A stored number is off by half a unit in its last place, or half the smallest number there is.
    relative, absolute = info.eps / 2, info.smallest_normal * info.eps / 2
    off_score = 0.3 * float((query.abs().sum(-1).max()) * (key.abs().max() * relative + absolute))
    off_value = float(value.abs().max() * relative + absolute)
    # Each weight changes by a factor of at most exp(2 * off_score).
    bound = off_value + math.expm1(2 * off_score) * (float(value.abs().max()) + off_value)
    error = (run(build(dtype), query, key, value, chunk=50) - exact(query, key, value)).abs().max()
    assert error <= bound + 1e-6
    assert error > relative / 50, "nothing was rounded"


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_every_query_sees_what_was_stored_even_of_its_own_step(dtype: str, chunk: int) -> None:
    query, key, value = inputs(50)
    stored = [x.to(NARROW[dtype]).float() for x in (key, value)]
    out = run(build(dtype), query, key, value, chunk=chunk)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact(query, *stored).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("kind", "window"), [("full", None), ("sliding", 11), ("chunked", 11)])
def test_the_result_does_not_depend_on_how_a_prompt_is_cut(dtype: str, kind: str, window: int | None) -> None:
    query, key, value = inputs(90)
    whole = run(build(dtype, kind=kind, window=window), query, key, value, chunk=90, window=window)
    for chunk in (1, 7, 20, 64):
        attention = build(dtype, kind=kind, window=window)
        cut = run(attention, query, key, value, chunk=chunk, window=window)
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", ["float16", *FP8])
def test_what_is_too_large_is_stored_as_the_largest_number(dtype: str, given: torch.dtype) -> None:
    attention, most = build(dtype), torch.finfo(NARROW[dtype]).max
    row = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 70_000, -70_000, 1.0], dtype=given)
    key = row.expand(1, HEADS, DIM)
    run(attention, torch.ones(1, HEADS, DIM, dtype=given), key, -key, chunk=1)
    block = int(table()[0])
    for cache, sign in zip(attention.kv(0), (1, -1), strict=True):
        expected = sign * torch.tensor([most, -most, most, -most, torch.nan, most, -most, 1.0])
        stored = cache[block, 0].float()
        assert torch.equal(stored.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0).expand(HEADS, DIM))


@pytest.mark.parametrize("dtype", ["float32", *FP8])
@pytest.mark.parametrize(
    "scales",
    [(0.5, 4.0), (torch.tensor(0.5), torch.tensor(4.0)), (torch.tensor([0.25, 3.0]), torch.tensor([8.0, 0.5]))],
    ids=["numbers", "scalars", "per head"],
)
def test_scales_divide_what_is_written_and_multiply_what_is_read(dtype: str, scales: tuple[Tensor, Tensor]) -> None:
    query, key, value = inputs(30)
    attention = build(dtype)
    extras = AttentionExtras(key_scale=scales[0], value_scale=scales[1])
    out = run(attention, query, key, value, chunk=30, extras=extras)
    meta = metadata(30, 30, table())
    by_head = [torch.as_tensor(scale).expand(HEADS)[:, None] for scale in scales]
    for cache, given, scale in zip(attention.kv(0), (key, value), by_head, strict=True):
        stored = cache.flatten(0, 1).float()[meta.slot_mapping]
        assert torch.equal(stored, (given / scale).to(cache.dtype).float())
    expected = paged_attention_oracle(
        query,
        *attention.kv(0),
        query_start=meta.query_start,
        seq_lens=meta.seq_lens,
        block_table=meta.block_table,
        scale=0.3,
        key_scale=scales[0],
        value_scale=scales[1],
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    again = run(build(dtype), query, key, value, chunk=7, extras=extras)
    torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-6)


def test_a_scale_keeps_large_keys_apart() -> None:
    query, key, value = inputs(30)
    query, key = query / 2000, key * 2000  # most keys are beyond 448
    want = exact(query, key, value)
    scaled = AttentionExtras(key_scale=torch.full((HEADS,), 16.0))
    errors = [
        float((run(build("fp8_e4m3"), query, key, value, chunk=30, extras=e) - want).abs().max())
        for e in (None, scaled)
    ]
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shared", [False, True])
def test_blocks_and_tokens_move_as_they_are(dtype: str, shared: bool) -> None:
    attention = build(dtype, "float32", shared=shared)
    assert attention.kv(0)[0].dtype is NARROW[dtype]
    query, key, value = inputs(3 * BLOCK)
    blocks = torch.tensor([5, 3, 9], dtype=torch.int32)
    run(attention, query, key, value, chunk=3 * BLOCK, blocks=blocks)
    before = [cache.float().clone() for cache in attention.kv(0)]
    attention.copy_blocks(0, torch.tensor([[5, 12], [9, 5]], dtype=torch.int32))
    attention.move_tokens(0, 3 * BLOCK + torch.tensor([1, 2]), 3 * BLOCK + torch.tensor([0, 1]))
    attention.zero_blocks(0, torch.tensor([9], dtype=torch.int32))
    for cache, old in zip(attention.kv(0), before, strict=True):
        now = cache.float()
        assert torch.equal(now[12], old[5])
        assert torch.equal(now[5], old[9])
        assert torch.equal(now[3], old[3, [1, 2, 2, 3]])
        assert not now[9].any()
        assert old[[5, 3, 9]].abs().amin(dim=(1, 2, 3)).isfinite().all()
        untouched = [b for b in range(BLOCKS) if b not in (3, 5, 9, 12)]
        assert not now[untouched].any()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shared", [False, True])
def test_bytes_of_blocks_can_be_taken_elsewhere_and_back(dtype: str, shared: bool) -> None:
    query, key, value = inputs(3 * BLOCK + 2)
    here, there = (build(dtype, dtype, shared=shared) for _ in range(2))
    blocks, others = table(1)[:4], table(2)[:4]
    run(here, query, key, value, chunk=5, layer=1, blocks=blocks)
    for source, destination in zip(here.kv(1), there.kv(1), strict=True):
        taken = source.view(torch.uint8)[blocks.long()].numpy().tobytes()
        arrived = torch.frombuffer(bytearray(taken), dtype=torch.uint8).view(4, BLOCK, HEADS, DIM)
        destination.view(torch.uint8)[others.long()] = arrived
    query, key, value = inputs(1, seed=1)
    here_meta, there_meta = (metadata(1, 3 * BLOCK + 3, b) for b in (blocks, others))
    outputs = [a.forward(1, query, key, value, m, scale=0.3) for a, m in ((here, here_meta), (there, there_meta))]
    assert torch.equal(*outputs)


def test_rows_of_another_step_are_planned_anew_where_a_runner_keeps_its_tensors() -> None:
    """Metadata whose tensors are filled again for every step; plans belong to the numbers, not to the tensors."""
    query, key, value = inputs(40)
    whole = run(build("float32"), query, key, value, chunk=40)
    attention, kept = build("float32"), metadata(1, 1, table())
    run(attention, query[:20], key[:20], value[:20], chunk=20)
    for position in range(20, 40):
        fresh = metadata(1, position + 1, table())
        for name in ("query_start", "seq_lens", "slot_mapping"):
            getattr(kept, name).copy_(getattr(fresh, name))
        meta = replace(kept, max_seq_len=position + 1, prepared=None)
        attention.prepare(meta)
        now = slice(position, position + 1)
        out = attention.forward(0, query[now], key[now], value[now], meta, scale=0.3)
        torch.testing.assert_close(out, whole[now], rtol=1e-5, atol=1e-6)
