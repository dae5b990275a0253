"""How fast the Triton kernels are, beside what the device can do and what PyTorch has."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Results = dict[str, Any]

#: query heads, key heads, size of a head
SHAPES = {"llama 8b": (32, 8, 128), "qwen 7b": (28, 4, 128), "llama-2 7b": (32, 32, 128)}
DECODES = [(1, 8192), (1, 65_536), (8, 8192), (32, 2048), (64, 4096), (128, 1024), (256, 1024)]
PREFILLS = [(8, 1024), (4, 2048), (1, 8192), (1, 16_384)]
QUICK_SHAPES, QUICK_DECODES, QUICK_PREFILLS = {"tiny": (4, 2, 16)}, [(2, 40)], [(1, 20)]
BLOCK_SIZE = 16
#: ceilings that parts share: bytes and operations per second
_CEILINGS: dict[str, float] = {}


def seconds(args: argparse.Namespace, run: Callable[[], object]) -> float:
    """Median seconds of a call whose data is not in the cache; one call in the interpreter."""
    if args.interpret:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    import triton

    return float(triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")) / 1e3


def ceilings(args: argparse.Namespace, results: Results) -> None:
    """Bandwidth of a copy and the rate of matrix products."""
    size, edge = (1 << 16, 64) if args.quick else (1 << 31, 8192)
    source = torch.ones(size, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    left, right = (torch.randn(edge, edge, dtype=torch.bfloat16, device=args.device) for _ in range(2))
    _CEILINGS["bandwidth"] = 2 * size / seconds(args, lambda: target.copy_(source))
    _CEILINGS["matmul"] = 2 * edge**3 / seconds(args, lambda: left @ right)
    results |= {"copy_gb_per_s": _CEILINGS["bandwidth"] / 1e9, "matmul_tflop_per_s": _CEILINGS["matmul"] / 1e12}
    print(f"   copy {results['copy_gb_per_s']:,.1f} GB/s, bf16 matmul {results['matmul_tflop_per_s']:,.2f} TFLOP/s")


def attention(args: argparse.Namespace, results: Results) -> None:
    """Decodes in GB/s and prefills in TFLOP/s, and each one's share of the ceiling."""
    from trivet_kernels.triton.attention import paged_attention

    if not _CEILINGS:
        ceilings(args, {})
    lines: list[Results] = results.setdefault("lines", [])
    print(f"   {'shape':<11}{'kind':<8}{'batch':>6}{'context':>9}{'us':>10}{'rate':>9}{'share':>7}{'sdpa us':>10}")
    for shape, (heads, kv_heads, head_dim) in (QUICK_SHAPES if args.quick else SHAPES).items():
        sizes = [("decode", *size) for size in (QUICK_DECODES if args.quick else DECODES)]
        sizes += [("prefill", *size) for size in (QUICK_PREFILLS if args.quick else PREFILLS)]
        for kind, batch, context in sizes:
            queries = 1 if kind == "decode" else context
            given = step(args, batch, queries, context, heads, kv_heads, head_dim)
            took = seconds(args, lambda given=given: paged_attention(**given))
            width = given["key_cache"].element_size()
            num_bytes = 2 * batch * context * kv_heads * head_dim * width
            flops = 2 * batch * heads * head_dim * context**2  # of the two products, half of which is masked
            rate = num_bytes / took / 1e9 if kind == "decode" else flops / took / 1e12
            limit = _CEILINGS["bandwidth"] / 1e9 if kind == "decode" else _CEILINGS["matmul"] / 1e12
            del given
            beside = seconds(args, sdpa(args, batch, queries, context, heads, kv_heads, head_dim))
            line = {"shape": shape, "kind": kind, "batch": batch, "context": context, "us": took * 1e6, "rate": rate}
            lines.append(line | {"share": rate / limit, "sdpa_us": beside * 1e6})
            print(
                f"   {shape:<11}{kind:<8}{batch:>6}{context:>9}{took * 1e6:>10.1f}{rate:>9.1f}{rate / limit:>7.0%}"
                f"{beside * 1e6:>10.1f}"
            )


def step(
    args: argparse.Namespace, batch: int, queries: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    """Arguments of ``paged_attention``; blocks lie scattered, as they come to."""
    blocks = -(-context // BLOCK_SIZE)
    dtype, device = torch.float32 if args.interpret else torch.bfloat16, args.device
    query = torch.randn(batch * queries, heads, head_dim, dtype=dtype, device=device)
    shape = batch * blocks + 1, BLOCK_SIZE, kv_heads, head_dim
    key, value = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    return {
        "query": query,
        "key_cache": key,
        "value_cache": value,
        "query_start": torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
        "block_table": (torch.randperm(batch * blocks, device=device) + 1).view(batch, blocks).int(),
        "max_query_len": queries,
        "max_seq_len": context,
        "scale": head_dim**-0.5,
        "out": torch.empty_like(query),
    }


def contiguous(
    args: argparse.Namespace, batch: int, queries: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[batch, heads, tokens, head_dim]``."""
    dtype = torch.float32 if args.interpret else torch.bfloat16
    query = torch.randn(batch, heads, queries, head_dim, dtype=dtype, device=args.device)
    key, value = (torch.randn(batch, kv_heads, context, head_dim, dtype=dtype, device=args.device) for _ in range(2))
    return query, key, value


def sdpa(args: argparse.Namespace, batch: int, queries: int, *sizes: int) -> Callable[[], Tensor]:
    """PyTorch's attention over contiguous keys."""
    given = contiguous(args, batch, queries, *sizes)
    return lambda: functional.scaled_dot_product_attention(*given, is_causal=queries > 1, enable_gqa=True)


def flex(args: argparse.Namespace, results: Results) -> None:
    """FlexAttention, compiled, on the prefill of 8192 tokens by the first shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads, kv_heads, head_dim = SHAPES["llama 8b"]
    context = 128 if args.quick else 8192
    given = contiguous(args, 1, context, context, heads, kv_heads, head_dim)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, context, context, device=args.device)  # noqa: ARG005
    run = flex_attention if args.interpret else torch.compile(flex_attention)
    took = seconds(args, lambda: run(*given, block_mask=mask, enable_gqa=True))
    results |= {"us": took * 1e6, "tflop_per_s": 2 * heads * head_dim * context**2 / took / 1e12}
    print(f"   prefill of {context}: {results['us']:,.1f} us, {results['tflop_per_s']:,.1f} TFLOP/s")


def tune(args: argparse.Namespace, results: Results) -> None:
    """Which tiles the search on this device chooses for the first shape."""
    if args.interpret:
        print("   measures nothing in the interpreter")
        return
    from trivet_kernels.triton.attention import shape_of
    from trivet_kernels.triton.measure import measured_tiles
    from trivet_kernels.triton.tune import default_tiles

    given = step(args, 1, 1, BLOCK_SIZE, *SHAPES["llama 8b"])
    shape = shape_of(given["query"], given["key_cache"], given["value_cache"])
    results |= {"default": str(default_tiles(shape))}
    results |= {"chosen": str(measured_tiles(shape, BLOCK_SIZE, torch.device(args.device)))}
    print(f"   default {results['default']}\n   chosen  {results['chosen']}")


#: temperature, top_k, top_p, min_p
DRAWS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 20, top-p 0.8": (0.7, 20, 0.8, 0.0),
    "top-p 0.95": (1.0, 0, 0.95, 0.0),
    "min-p 0.1": (1.0, 0, 1.0, 0.1),
}


def sampling(args: argparse.Namespace, results: Results) -> None:
    """Draws, and logprobs of the five likeliest, over a large vocabulary; PyTorch's argmax and a sort beside them."""
    from trivet_kernels.triton.logprobs import logprobs
    from trivet_kernels.triton.sampling import draw, parameters

    size = 300 if args.quick else 151_936
    lines: list[Results] = results.setdefault("lines", [])

    def note(what: str, rows: int, run: Callable[[], object]) -> None:
        took = seconds(args, run)
        lines.append({"what": what, "rows": rows, "us": took * 1e6})
        print(f"   {what:<22}{rows:>5} rows{took * 1e6:>12.1f} us")

    for rows in (2,) if args.quick else (1, 8, 64, 256):
        logits = torch.randn(rows, size, device=args.device).mul_(3).to(torch.bfloat16)
        for name, (temperature, top_k, top_p, min_p) in DRAWS.items():
            params = parameters(
                np.full(rows, temperature, np.float32),
                np.full(rows, top_k),
                np.full(rows, top_p),
                np.full(rows, min_p),
                np.arange(rows),
                np.arange(rows),
            ).to(torch.device(args.device))
            note(name, rows, lambda logits=logits, params=params: draw(logits, size, params))
        tokens = torch.zeros(rows, dtype=torch.int64, device=args.device)
        note("logprobs", rows, lambda logits=logits, tokens=tokens: logprobs(logits, tokens, 5, size))
        note("torch argmax", rows, lambda logits=logits: logits.argmax(1))
        note("torch softmax and sort", rows, lambda logits=logits: logits.float().softmax(1).sort(descending=True))
