"""How fast the Triton kernels are, beside what the device can do and what PyTorch has."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
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


def seconds(args: argparse.Namespace, calls: Sequence[Callable[[], object]], *, recorded: bool = True) -> float:
    """Median seconds of a call, of calls that do the same on copies of the data; one run in the interpreter.

    Without ``recorded`` calls are launched in place of recorded into a graph, for what is not fit for that and takes
    far longer than its launches.
    """
    if args.device == "meta":
        calls[0]()
        return 1.0
    if args.interpret:
        began = time.perf_counter()
        calls[0]()
        return time.perf_counter() - began
    if recorded:
        from trivet_kernels.triton.measure import graph_seconds

        return graph_seconds(calls)
    import triton

    return float(triton.testing.do_bench(calls[0], warmup=10, rep=40, return_mode="median")) / 1e3


def copies(args: argparse.Namespace, num_bytes: int) -> range:
    """Numbers of the copies of data of ``num_bytes`` that a measurement is to go over."""
    if args.device != "cuda":
        return range(1)
    from trivet_kernels.triton.measure import copies_for

    return range(copies_for(num_bytes, torch.device("cuda", torch.cuda.current_device())))


def ceilings(args: argparse.Namespace, results: Results) -> None:
    """Bandwidth of a copy and the rate of matrix products."""
    size, edge = (1 << 16, 64) if args.quick else (1 << 31, 8192)
    source = torch.ones(size, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    left, right = (torch.randn(edge, edge, dtype=torch.bfloat16, device=args.device) for _ in range(2))
    _CEILINGS["bandwidth"] = 2 * size / seconds(args, [lambda: target.copy_(source)])
    _CEILINGS["matmul"] = 2 * edge**3 / seconds(args, [lambda: left @ right])
    results |= {"copy_gb_per_s": _CEILINGS["bandwidth"] / 1e9, "matmul_tflop_per_s": _CEILINGS["matmul"] / 1e12}
    args.note(f"   copy {results['copy_gb_per_s']:,.1f} GB/s, bf16 matmul {results['matmul_tflop_per_s']:,.2f} TFLOP/s")


def bandwidth(args: argparse.Namespace) -> float:
    """Bytes per second that a copy moves, read and written."""
    if not _CEILINGS:
        ceilings(args, {})
    return _CEILINGS["bandwidth"]


def attention(args: argparse.Namespace, results: Results) -> None:
    """Decodes in GB/s, then prefills in TFLOP/s, and each one's share of the ceiling."""
    bandwidth(args)
    lines: list[Results] = results.setdefault("lines", [])
    args.note(f"   {'shape':<11}{'kind':<8}{'batch':>6}{'context':>9}{'us':>10}{'rate':>9}{'share':>7}{'sdpa us':>10}")
    kinds = {
        "decode": QUICK_DECODES if args.quick else DECODES,
        "prefill": QUICK_PREFILLS if args.quick else PREFILLS,
    }
    for kind, sizes in kinds.items():
        for shape, heads in (QUICK_SHAPES if args.quick else SHAPES).items():
            for batch, context in sizes:
                line = {"shape": shape, "kind": kind, "batch": batch, "context": context}
                lines.append(line | _one_attention(args, kind, batch, context, *heads))
                line = lines[-1]
                args.note(
                    f"   {shape:<11}{kind:<8}{batch:>6}{context:>9}{line['us']:>10.1f}{line['rate']:>9.1f}"
                    f"{line['share']:>7.0%}{line['sdpa_us']:>10.1f}"
                )


def _one_attention(
    args: argparse.Namespace, kind: str, batch: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> Results:
    """Microseconds of a call by these kernels and by PyTorch's; GB/s or TFLOP/s, and the share of the ceiling."""
    from trivet_kernels.triton.attention import paged_attention

    queries = 1 if kind == "decode" else context
    num_bytes = 2 * batch * context * kv_heads * head_dim * (4 if args.interpret else 2)
    flops = 2 * batch * heads * head_dim * context**2  # of the two products, half of which is masked
    sizes = batch, queries, context, heads, kv_heads, head_dim
    givens = [step(args, *sizes) for _ in copies(args, num_bytes)]
    took = seconds(args, [lambda given=given: paged_attention(**given) for given in givens])
    del givens
    work, limit = (num_bytes, _CEILINGS["bandwidth"]) if kind == "decode" else (flops, _CEILINGS["matmul"])
    beside = seconds(args, [sdpa(args, *sizes) for _ in copies(args, num_bytes)])
    rate = work / took
    unit = 1e9 if kind == "decode" else 1e12
    return {"us": took * 1e6, "rate": rate / unit, "share": rate / limit, "sdpa_us": beside * 1e6}


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
    took = seconds(args, [lambda: run(*given, block_mask=mask, enable_gqa=True)], recorded=False)
    results |= {"us": took * 1e6, "tflop_per_s": 2 * heads * head_dim * context**2 / took / 1e12}
    args.note(f"   prefill of {context}: {results['us']:,.1f} us, {results['tflop_per_s']:,.1f} TFLOP/s")


def products(args: argparse.Namespace, results: Results) -> None:
    """Products of few rows with quantised weights, as GB/s of weights and beside PyTorch's with bfloat16 weights."""
    from _gpu_correctness import quantized_layer

    columns, outputs = (80, 40) if args.quick else (4096, 28_672)
    lines: list[Results] = results.setdefault("lines", [])
    dtype = torch.float32 if args.interpret else torch.bfloat16
    weights: dict[str, tuple[int, list[Callable[[Tensor], Tensor]]]] = {}
    plain = [
        torch.randn(outputs, columns, dtype=dtype, device=args.device).T for _ in copies(args, 2 * outputs * columns)
    ]
    weights["bfloat16"] = plain[0].nbytes, [lambda x, weight=weight: x @ weight for weight in plain]
    for name in ("int8", "int4"):
        layers = [quantized_layer(name, columns, outputs, args.device)[0] for _ in copies(args, outputs * columns // 2)]
        weights[name] = layers[0].weight_bytes, layers
    for rows in (2,) if args.quick else (1, 16, 64, 256):
        x = torch.randn(rows, columns, dtype=dtype, device=args.device)
        for name, (num_bytes, multiply) in weights.items():
            took = seconds(args, [functools.partial(each, x) for each in multiply])
            lines.append({"weights": name, "rows": rows, "us": took * 1e6, "gb_per_s": num_bytes / took / 1e9})
            args.note(f"   {name:<9}{rows:>5} rows{took * 1e6:>10.1f} us{num_bytes / took / 1e9:>9,.0f} GB/s")


def tune(args: argparse.Namespace, results: Results) -> None:
    """Which tiles the search on this device chooses for the first shape."""
    if args.interpret:
        args.note("   measures nothing in the interpreter")
        return
    from trivet_kernels.triton.attention import paged_attention, shape_of
    from trivet_kernels.triton.measure import measured_calls, measured_tiles
    from trivet_kernels.triton.tune import candidates, default_tiles

    given = step(args, 1, 1, BLOCK_SIZE, *SHAPES["llama 8b"])
    shape = shape_of(given["query"], given["key_cache"], given["value_cache"])
    device = torch.device(args.device)
    if args.device == "meta":
        for call in measured_calls(shape, BLOCK_SIZE, device):
            for tiles in candidates(shape):
                paged_attention(**call, tiles=tiles)
        return
    results["default"] = str(default_tiles(shape))
    results["chosen"] = str(measured_tiles(shape, BLOCK_SIZE, device, limit=10.0))
    args.note(f"   default {results['default']}\n   chosen  {results['chosen']}")


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

    def note(what: str, run: Callable[[Tensor], object], *, recorded: bool = True) -> None:
        took = seconds(args, [lambda given=given: run(given) for given in givens], recorded=recorded)
        lines.append({"what": what, "rows": rows, "us": took * 1e6})
        args.note(f"   {what:<22}{rows:>5} rows{took * 1e6:>12.1f} us")

    for rows in (2,) if args.quick else (1, 8, 64, 256):
        givens = [
            torch.randn(rows, size, device=args.device).mul_(3).to(torch.bfloat16)
            for _ in copies(args, 2 * rows * size)
        ]
        for name, (temperature, top_k, top_p, min_p) in DRAWS.items():
            params = parameters(
                np.full(rows, temperature, np.float32),
                np.full(rows, top_k),
                np.full(rows, top_p),
                np.full(rows, min_p),
                np.arange(rows),
                np.arange(rows),
            ).to(torch.device(args.device))
            note(name, lambda logits, params=params: draw(logits, size, params))
        tokens = torch.zeros(rows, dtype=torch.int64, device=args.device)
        note("logprobs", lambda logits, tokens=tokens: logprobs(logits, tokens, 5, size))
        note("torch argmax", lambda logits: logits.argmax(1))
        note("torch softmax and sort", lambda logits: logits.float().softmax(1).sort(descending=True), recorded=False)
