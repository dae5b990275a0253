"""Attention over a paged cache and the writes to it: data, and what each provider calls.

What a step plans once for all layers (rows, places of keys) is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from _kernel_cases import Model, Setting
from _kernel_timing import Case, Run, copies, turns
from torch.nn import functional

from trivet_kernels.reference.attention import paged_attention, plan_attention
from trivet_kernels.reference.cache import reshape_and_cache

if TYPE_CHECKING:
    from torch import Tensor

Writer = Callable[..., object]
BLOCK_SIZE = 16
_DTYPE = torch.bfloat16


class Layer:
    """One layer's attention in a step of ``batch`` rows, each with ``num_queries`` queries at the end of a context of
    ``context`` tokens. The blocks of a row are scattered over the cache."""

    def __init__(self, setting: Setting, model: Model, batch: int, num_queries: int, context: int) -> None:
        self.model, self.batch, self.num_queries, self.context = model, batch, num_queries, context
        device, tokens = setting.device, batch * num_queries
        blocks = -(-context // BLOCK_SIZE)
        self.caches = [setting.random(batch * blocks, BLOCK_SIZE, model.kv_heads, model.head_dim) for _ in range(2)]
        order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(0))
        self.table = order.view(batch, blocks).int().to(device)
        self.query = setting.random(tokens, model.heads, model.head_dim)
        self.key, self.value = (setting.random(tokens, model.kv_heads, model.head_dim) for _ in range(2))
        self.query_start = torch.arange(batch + 1, dtype=torch.int32, device=device) * num_queries
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        positions = torch.arange(context - num_queries, context, device=device)
        self.slots = (self.table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
        self.scale = model.head_dim**-0.5

    @property
    def num_bytes(self) -> int:
        """Keys and values once, queries and results."""
        model = self.model
        stored = 2 * self.batch * self.context * model.kv_heads * model.head_dim
        return (stored + 2 * self.query.numel()) * _DTYPE.itemsize

    @property
    def num_flops(self) -> int:
        """Of both products, for keys that a query sees."""
        seen = self.num_queries * (2 * self.context - self.num_queries + 1) // 2
        return 4 * self.model.heads * self.model.head_dim * self.batch * seen

    def run(self, provider: str) -> Run:
        """A call that writes the step's keys and values and attends."""
        made: Run = getattr(self, f"_{provider}")()
        return made

    def _torch(self) -> Run:
        keys, values = self.caches
        plan = plan_attention(self.query_start, self.seq_lens, self.table, BLOCK_SIZE)

        def run(_: int) -> object:
            reshape_and_cache(self.key, self.value, keys, values, self.slots)
            return paged_attention(self.query, keys, values, plan, scale=self.scale, key=self.key, value=self.value)

        return run

    def _cpu(self) -> Run:
        from trivet_kernels.cpu.attention import CachedAttention, Step
        from trivet_kernels.cpu.build import library

        compiled = library()
        assert compiled is not None
        kernel = CachedAttention(compiled, *self.caches)
        step = Step(self.query_start, self.seq_lens, self.table, self.slots)
        return lambda _: kernel(self.query, self.key, self.value, step, scale=self.scale)

    def _triton(self) -> Run:
        from trivet_kernels.triton.attention import paged_attention as attend
        from trivet_kernels.triton.cache import reshape_and_cache as write

        keys, values = self.caches

        def run(_: int) -> object:
            write(self.key, self.value, keys, values, self.slots)
            return attend(
                self.query,
                keys,
                values,
                query_start=self.query_start,
                seq_lens=self.seq_lens,
                block_table=self.table,
                max_query_len=self.num_queries,
                max_seq_len=self.context,
                scale=self.scale,
            )

        return run

    def _sdpa(self) -> Run:
        """PyTorch's attention over keys and values that lie in one piece, without a cache: what paging costs."""
        model = self.model
        query = self.query.view(self.batch, self.num_queries, model.heads, model.head_dim).transpose(1, 2)
        shape = self.batch, model.kv_heads, self.context, model.head_dim
        keys, values = (cache.flatten()[: torch.Size(shape).numel()].view(shape) for cache in self.caches)
        causal = self.num_queries > 1

        def run(_: int) -> Tensor:
            return functional.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)

        return run


def attention_providers(device: torch.device) -> list[str]:
    """Who attends on a device."""
    from trivet_kernels.cpu.build import library

    if device.type == "cuda":
        return [*(["triton"] if find_spec("triton") else []), "torch", "sdpa"]
    return [*(["cpu"] if library() is not None else []), "torch", "sdpa"]


def decodes(setting: Setting) -> Iterator[Case]:
    """One query per row, contexts of one length; caches take turns so that they come from memory."""
    for model in setting.models:
        for context in (128,) if setting.quick else (128, 512, 1024, 2048, 4096):
            for batch in (1, 8) if setting.quick else (1, 8, 64):
                yield from _cases(setting, "decode attention", model, batch, 1, context)


def prefills(setting: Setting) -> Iterator[Case]:
    """A whole prompt at once."""
    for model in setting.models:
        for length in (128,) if setting.quick else (128, 512, 1024, 2048):
            yield from _cases(setting, "prefill attention", model, 1, length, length)


def _cases(setting: Setting, kernel: str, model: Model, batch: int, queries: int, context: int) -> Iterator[Case]:
    first = Layer(setting, model, batch, queries, context)
    layers = [first]
    if queries == 1:
        count = copies(first.num_bytes, setting.spread)
        layers += [Layer(setting, model, batch, queries, context) for _ in range(count - 1)]
    shape = f"{model.name} {batch} x {context}"
    for provider in attention_providers(setting.device):
        run = turns([layer.run(provider) for layer in layers])
        yield Case(kernel, shape, provider, "bfloat16", first.num_bytes, first.num_flops, run)


def cache_writes(setting: Setting) -> Iterator[Case]:
    """Keys and values of a step to their places. The CPU's kernel writes them when it attends."""
    for model in setting.models:
        for tokens in (1, 64) if setting.quick else (1, 64, 2048):
            layer = Layer(setting, model, 1, tokens, max(tokens, BLOCK_SIZE))
            num_bytes = 2 * (layer.key.nbytes + layer.value.nbytes)
            writers: dict[str, Writer] = {"torch": reshape_and_cache}
            if setting.device.type == "cuda" and find_spec("triton"):
                from trivet_kernels.triton.cache import reshape_and_cache as write_by_triton

                writers = {"triton": write_by_triton} | writers
            for provider, write in writers.items():

                def run(_: int, write: Writer = write, layer: Layer = layer) -> object:
                    return write(layer.key, layer.value, *layer.caches, layer.slots)

                yield Case("cache write", f"{model.name} {tokens} tokens", provider, "bfloat16", num_bytes, 0, run)
