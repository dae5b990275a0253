"""Every Triton kernel on random inputs against float64, or against plain PyTorch where results must be equal."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOLERANCE = 1e-2
Results = dict[str, Any]


class Checks:
    """Named errors of a part; all are computed and printed before a bad one raises."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self._args = args
        self._errors: dict[str, float] = results.setdefault("errors", {})

    @property
    def dry(self) -> bool:
        """Whether launches are only noted, and there is nothing to compare."""
        return bool(self._args.device == "meta")

    def near(self, name: str, got: Tensor, expected: Tensor) -> None:
        """Compare by norms; NaN anywhere is an infinite error."""
        if not self.dry:
            got, expected = got.double(), expected.double()
            error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
            self._note(name, error if math.isfinite(error) else math.inf)

    def equal(self, name: str, got: Tensor, expected: Tensor) -> None:
        """Compare exactly."""
        if not self.dry:
            self._note(name, 0.0 if torch.equal(got.cpu(), expected.cpu()) else math.inf)

    def _note(self, name: str, error: float) -> None:
        self._errors[name] = error
        self._args.note(f"   {name}: {error:.2e}")

    def conclude(self) -> None:
        """Raise if an error is larger than may be."""
        if bad := [name for name, error in self._errors.items() if not error <= TOLERANCE]:
            raise AssertionError(f"wrong results: {', '.join(bad)}")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """In the block new tensors hold NaN or the largest integer until something is written to them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclass
class Step:
    """An attention step: ``rows`` are (queries, context) pairs.

    ``parents`` are the rows' trees of drafts, each node's parent (-1: the last known token), which end the rows.
    """

    rows: list[tuple[int, int]]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int | None = None
    block_size: int = 16
    dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    parents: list[list[int]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, device: str, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of ``paged_attention``; everything that nothing may read is NaN."""
        from trivet_kernels.triton.attention import plan_tree

        dtype = self.dtype or dtype
        v_head_dim = self.v_head_dim or self.head_dim
        counts = [queries for queries, _ in self.rows]
        needs = [-(-context // self.block_size) for _, context in self.rows]
        order = (torch.randperm(sum(needs)) + 1).tolist()
        table = torch.zeros(len(self.rows), max(needs), dtype=torch.int32)
        shape = sum(needs) + 1, self.block_size, self.kv_heads
        key, value = (torch.randn(*shape, size, device=device, dtype=dtype) for size in (self.head_dim, v_head_dim))
        for row, need in enumerate(needs):
            blocks = [order.pop() for _ in range(need)]
            table[row, :need] = torch.tensor(blocks, dtype=torch.int32)
            beyond = self.rows[row][1] - (need - 1) * self.block_size
            key[blocks[-1], beyond:] = value[blocks[-1], beyond:] = torch.nan
        key[0] = value[0] = torch.nan
        start = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
        query = torch.randn(sum(counts), self.heads, self.head_dim, device=device, dtype=dtype)
        given = {
            "query": query,
            "key_cache": key.to(self.kv_dtype or dtype),
            "value_cache": value.to(self.kv_dtype or dtype),
            "query_start": start.to(device),
            "seq_lens": torch.tensor([context for _, context in self.rows], dtype=torch.int32, device=device),
            "block_table": table.to(device),
            "max_query_len": max(counts),
            "max_seq_len": max(context for _, context in self.rows),
            "scale": self.head_dim**-0.5,
            "out": query.new_full((*query.shape[:2], v_head_dim), torch.nan),
            **{name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.options.items()},
        }
        if self.parents:
            lens = torch.tensor([len(parents) for parents in self.parents], dtype=torch.int32)
            given["tree"] = plan_tree(lens.to(device), self.tree_mask().to(device))
        return given

    def tree_mask(self) -> Tensor:
        """Which nodes a node sees, ``[rows, n, n]``: its ancestors and itself."""
        most = max(map(len, self.parents))
        mask = torch.zeros(len(self.parents), most, most, dtype=torch.bool)
        for row, parents in enumerate(self.parents):
            for node, parent in enumerate(parents):
                if parent >= 0:
                    mask[row, node] = mask[row, parent]
                mask[row, node, node] = True
        return mask


def expected_attention(step: Step, given: dict[str, Any]) -> Tensor:
    """Attention in float64, row by row."""
    out, first = [], 0
    options, group = step.options, step.heads // step.kv_heads
    softcap, sinks = options.get("softcap"), options.get("sinks")
    for row, (count, context) in enumerate(step.rows):
        query = given["query"][first : first + count].double()
        first += count
        blocks = given["block_table"][row, : -(-context // step.block_size)].long()
        key, value = (
            given[name][blocks].float().double().flatten(0, 1)[:context].repeat_interleave(group, 1)
            * options.get(scale, 1.0)
            for name, scale in (("key_cache", "key_scale"), ("value_cache", "value_scale"))
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) * given["scale"]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place, seen = (x.to(query.device) for x in _places(step, row))
        own = place[context - count :, None]
        if "alibi_slopes" in options:
            scores = scores - given["alibi_slopes"].double()[:, None, None] * (own - place)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            extra = given["sinks"].double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, extra], 2)
        weights = scores.softmax(2)[:, :, :context]
        out.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(out)


def _places(step: Step, row: int) -> tuple[Tensor, Tensor]:
    """Positions in the text ``[context]`` of a row's tokens, and which of them its queries see ``[count, context]``."""
    count, context = step.rows[row]
    place = torch.arange(context)
    own = place[context - count :, None]
    seen = place <= own
    nodes = len(step.parents[row]) if step.parents else 0
    if nodes:
        mask = step.tree_mask()[row, :nodes, :nodes]
        place[context - nodes :] = context - nodes - 1 + mask.sum(1)
        seen[count - nodes :, context - nodes :] = mask
    window = step.options.get("window")
    if window is not None:
        seen &= place >= (own // window * window if step.options.get("chunked") else own - window + 1)
    return place, seen


def attention_steps(quick: bool) -> dict[str, Step]:
    """What is checked: prefill, decode of one part and of several, a mixture, and each feature."""
    if quick:
        small: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
        tree = Step([(6, 40), (1, 9)], parents=[[-1, 0, 0, 1, -1], []], **small)
        chunked = Step([(9, 20), (1, 40)], v_head_dim=24, block_size=4, options={"window": 7, "chunked": True}, **small)
        return {"decode": Step([(1, 1), (1, 40)], **small), "prefill": Step([(20, 20)], **small)} | {
            "trees": tree,
            "chunks": chunked,
        }
    decode, mixed = [(1, 1), (1, 16), (1, 700), (1, 3001)], [(1, 900), (4, 70), (130, 130), (64, 1000), (1, 33)]
    steps = {
        "decode": Step(decode),
        "decode of one long row": Step([(1, 20_011)]),
        "prefill": Step([(257, 257), (1024, 1024)]),
        "drafts": Step([(5, 600), (8, 8), (2, 65)]),
        "mixed": Step(mixed),
        "window": Step(mixed, options={"window": 100}),
        "chunks": Step(mixed, options={"window": 96, "chunked": True}),
        "soft cap": Step(mixed, options={"softcap": 5.0}),
        "sinks": Step(mixed, options={"sinks": torch.randn(32)}),
        "alibi": Step(mixed, options={"alibi_slopes": 2.0 ** -torch.arange(1.0, 33.0) * 0.1}),
        "float16": Step(mixed, dtype=torch.float16),
    }
    drafts = [[-1, 0, 0, 1, -1, 4, 5], [-1, -1, -1], [], [-1, 0, 1, 2, 3, 3]]
    few, many = [(1 + len(tree), 500 + 12 * len(tree)) for tree in drafts], [(40, 700), (8, 33), (1, 90), (300, 300)]
    trees: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
        "trees": (few, {}),
        "trees in a window": (few, {"window": 20}),
        "trees in chunks": (few, {"window": 24, "chunked": True}),
        "trees after a prefill": (many, {}),
    }
    steps |= {name: Step(rows, parents=drafts, options=options) for name, (rows, options) in trees.items()}
    for name in ("float8_e4m3fn", "float8_e5m2"):
        scales = {"key_scale": 0.5, "value_scale": 0.8}
        steps[name] = Step(mixed, kv_dtype=getattr(torch, name), options=scales)
    for size in (1, 8, 48, 128):
        steps[f"blocks of {size}"] = Step(mixed, block_size=size)
    for heads, kv_heads, head_dim in ((14, 2, 64), (28, 4, 128), (8, 8, 80), (32, 32, 96), (8, 1, 256), (128, 1, 64)):
        steps[f"{heads}/{kv_heads} heads of {head_dim}"] = Step(mixed, heads, kv_heads, head_dim)
    steps["keys of 192, values of 128"] = Step(mixed, 16, 16, 192, 128)
    return steps


def attention(args: argparse.Namespace, results: Results) -> None:
    """Paged attention."""
    from trivet_kernels.triton.attention import paged_attention

    torch.manual_seed(args.seed)
    checks = Checks(args, results)
    for name, step in attention_steps(args.quick).items():
        given = step.make(args.device, _dtype(args))
        with poisoned():
            got = paged_attention(**given)
        if not checks.dry:
            checks.near(name, got, expected_attention(step, given))
    checks.conclude()


def cache(args: argparse.Namespace, results: Results) -> None:
    """Cache writes and copies."""
    from trivet_kernels.triton import cache as kernels

    torch.manual_seed(args.seed)
    checks = Checks(args, results)
    blocks, size, heads, head_dim = (8, 4, 2, 16) if args.quick else (500, 16, 8, 128)
    count = blocks * size // 3
    for kv_dtype in (_dtype(args), torch.float8_e4m3fn):
        caches = [torch.zeros(blocks, size, heads, head_dim, dtype=kv_dtype, device=args.device) for _ in range(2)]
        tokens = torch.randn(2, count, heads, head_dim, dtype=_dtype(args), device=args.device)
        slots = torch.randperm(blocks * size, device=args.device)[:count]
        slots[::7] = -1
        kernels.reshape_and_cache(*tokens, *caches, slots, key_scale=0.5)
        if checks.dry:
            continue
        written = slots >= 0
        for name, stored, given, scale in (("keys", caches[0], tokens[0], 0.5), ("values", caches[1], tokens[1], 1.0)):
            flat = stored.flatten(0, 1).float()
            bound = 1.0 if kv_dtype == _dtype(args) else 0.3  # of an 8-bit number's rounding error
            error = (flat[slots[written]] * scale - given[written].float()).double()
            checks.near(f"{name} as {kv_dtype}", given[written].double() + bound * error, given[written])
            rest = torch.ones(blocks * size, dtype=torch.bool, device=args.device)
            rest[slots[written]] = False
            checks.equal(f"other {name} as {kv_dtype}", flat[rest], torch.zeros_like(flat[rest]))
    stored = torch.randn(blocks, size, heads, head_dim, dtype=_dtype(args), device=args.device)
    expected = stored.clone()
    pairs = torch.randperm(blocks, device=args.device)[: blocks // 2 * 2].view(-1, 2)
    expected[pairs[:, 1]] = stored[pairs[:, 0]]
    with poisoned():
        kernels.copy_blocks(stored, pairs)
    checks.equal("block copies", stored, expected)
    expected[pairs[:3, 0]] = 0
    kernels.zero_blocks(stored, pairs[:3, 0])
    checks.equal("zeroed blocks", stored, expected)
    moved = torch.randperm(blocks * size, device=args.device)[:20].view(2, -1)
    expected.flatten(0, 1)[moved[1]] = expected.flatten(0, 1)[moved[0]]
    with poisoned():
        kernels.move_tokens(stored, moved[0], moved[1])
    checks.equal("moved tokens", stored, expected)
    checks.conclude()


def operations(args: argparse.Namespace, results: Results) -> None:
    """Norms, rotations and gated activations."""
    from trivet_kernels.reference.ops import ReferenceOps
    from trivet_kernels.triton.ops import TritonOps

    torch.manual_seed(args.seed)
    checks, ops, reference = Checks(args, results), TritonOps(), ReferenceOps()
    dtype, device = _dtype(args), args.device
    tokens, sizes = (3, (80,)) if args.quick else (301, (896, 4096, 5120))
    for size in sizes:
        x, residual = (torch.randn(tokens, size, dtype=dtype, device=device) for _ in range(2))
        weight = torch.randn(size, device=device)
        wide = residual.double()
        gated = torch.randn(tokens, 2 * size, dtype=dtype, device=device)
        with poisoned():
            normal, added = ops.rms_norm(x, weight, 1e-6), ops.add_rms_norm(x, residual, weight, 1e-6)
            silu = ops.silu_and_mul(gated)
            gelus = {approximate: ops.gelu_and_mul(gated, approximate=approximate) for approximate in (True, False)}
        checks.near(f"norm of {size}", normal, reference.rms_norm(x.double(), weight, 1e-6))
        expected = reference.add_rms_norm(x.double(), wide, weight, 1e-6)
        checks.near(f"residual norm of {size}", added, expected)
        checks.near(f"residual of {size}", residual, wide)
        checks.near(f"silu of {size}", silu, reference.silu_and_mul(gated.double()))
        for approximate, gelu in gelus.items():
            wanted = reference.gelu_and_mul(gated.double(), approximate=approximate)
            checks.near(f"gelu of {size}, {'tanh' if approximate else 'erf'}", gelu, wanted)
    for heads, kv_heads, size, rotated in ((4, 2, 16, 8),) if args.quick else ((32, 8, 128, 128), (16, 16, 80, 20)):
        positions = torch.randint(0, 5000, (tokens,), device=device)
        angles = torch.outer(
            torch.arange(5000.0, device=device), 1e4 ** -(torch.arange(rotated // 2, device=device) * 2 / rotated)
        )
        table = torch.cat([angles.cos(), angles.sin()], 1)
        for interleaved in (False, True):
            for norm in (False, True):
                query = torch.randn(tokens, heads, size, dtype=dtype, device=device)
                key = torch.randn(tokens, kv_heads, size, dtype=dtype, device=device)
                wide_query, wide_key = query.double(), key.double()
                options: dict[str, Any] = {"interleaved": interleaved}
                if norm:
                    weights = torch.randn(2, size, device=device)
                    options |= {"query_weight": weights[0], "key_weight": weights[1], "eps": 1e-6}
                ops.rotary(query, key, positions, table, **options)
                reference.rotary(wide_query, wide_key, positions, table, **options)
                name = f"rotation of {rotated} in {size}, {interleaved=}, {norm=}"
                checks.near(f"queries: {name}", query, wide_query)
                checks.near(f"keys: {name}", key, wide_key)
    checks.conclude()


def experts(args: argparse.Namespace, results: Results) -> None:
    """Mixtures of experts."""
    from trivet_kernels.moe import StackedExperts
    from trivet_kernels.reference.moe import mixture as reference
    from trivet_kernels.triton.moe import mixture

    torch.manual_seed(args.seed)
    checks, dtype, device = Checks(args, results), _dtype(args), args.device
    # tokens, experts, experts of a token, sizes, activation, biases
    cases: list[tuple[int, int, int, int, int, Any, bool]] = [(5, 4, 2, 32, 24, "clamped", True)]
    if not args.quick:
        cases = [(1, 128, 8, 2048, 768, "silu", False), (200, 8, 2, 1024, 1792, "gelu_tanh", False)]
        cases += [(tokens, 32, 4, 2880, 2880, "clamped", True) for tokens in (3, 100)]
    for tokens, count, top_k, hidden, size, activation, biased in cases:
        gate_up, down = (
            torch.randn(count, *shape, dtype=dtype, device=device) * shape[1] ** -0.5
            for shape in ((2 * size, hidden), (hidden, size))
        )
        biases = [torch.randn(count, n, dtype=dtype, device=device) if biased else None for n in (2 * size, hidden)]
        stacked = StackedExperts(gate_up, down, activation, *biases, slope=1.7, limit=7.0)
        x = torch.randn(tokens, hidden, dtype=dtype, device=device)
        weights, chosen = torch.randn(tokens, count, device=device).softmax(1).topk(top_k)
        with poisoned():
            got = mixture(x, chosen, weights, stacked)
        if not checks.dry:
            name = f"{top_k} of {count} experts, {hidden} by {size}, {activation}, {tokens} tokens"
            checks.near(name, got, reference(x.double(), chosen, weights, stacked))
    checks.conclude()


#: values of a group (0: a row), bits, zero point, whether there are offsets, whether scales are float32
WEIGHTS = {
    "int8": (128, 8, 128, False, True),
    "int8 by rows": (0, 8, 128, False, True),
    "int4": (32, 4, 0, True, False),
    "Q3_K": (16, 4, 4, False, False),
    "Q6_K": (16, 8, 128, False, False),
}


def quantized_layer(name: str, columns: int, outputs: int, device: str) -> tuple[Any, Any]:
    """A layer of random weights, and these as a matrix; on ``meta`` nothing is put into the layer."""
    from trivet_kernels.reference.quantized import QuantizedMatrix
    from trivet_kernels.triton.quantized import QuantizedLinear

    segment, bits, zero_point, offsets, wide_scale = WEIGHTS[name]
    segment = segment or -(-columns // 16) * 16
    groups = -(-columns // segment)
    values = torch.randint(0, 1 << bits, (outputs, groups * segment), dtype=torch.uint8, device=device)
    scale, offset = ((torch.randn(outputs, groups, device=device) * 0.01).half().float() for _ in range(2))
    matrix = QuantizedMatrix(values, scale, offset if offsets else None, columns, segment, bits, zero_point)
    form: dict[str, Any] = {"segment": segment, "bits": bits, "zero_point": zero_point}
    layer = QuantizedLinear(columns, outputs, **form, offsets=offsets, wide_scale=wide_scale, device=device)
    if device != "meta":
        layer.put(matrix)
    return layer, matrix


def quantized(args: argparse.Namespace, results: Results) -> None:
    """Products with weights of eight and four bits."""
    torch.manual_seed(args.seed)
    checks, dtype = Checks(args, results), _dtype(args)
    for columns, outputs in ((80, 40),) if args.quick else ((4096, 6144), (900, 1001)):
        for name in WEIGHTS:
            layer, matrix = quantized_layer(name, columns, outputs, args.device)
            for rows in (3,) if args.quick else (1, 17, 200):
                x = torch.randn(rows, columns, dtype=dtype, device=args.device)
                with poisoned():
                    got = layer(x)
                if not checks.dry:
                    expected = x.double() @ matrix.dequantized(torch.float64).T
                    checks.near(f"{name}, {columns} to {outputs}, {rows} rows", got, expected)
    checks.conclude()


def logits(args: argparse.Namespace, results: Results) -> None:
    """Masks, biases and penalties."""
    from trivet_kernels.reference import logits as reference
    from trivet_kernels.reference import sampling as reference_sampling
    from trivet_kernels.triton import logits as kernels

    torch.manual_seed(args.seed)
    checks, (rows, size) = Checks(args, results), (3, 300) if args.quick else (64, 151_936)
    given = torch.randn(rows, size) * 5
    mask = torch.randint(-(2**31), 2**31 - 1, (rows, -(-size // 32)), dtype=torch.int32)
    mask[::2] = -1
    count = size // 4
    ids = torch.cat([torch.randperm(size)[:count] for _ in range(rows)]).int()
    offsets = (torch.arange(rows + 1) * count).int()
    tokens = reference.SparseTokens(torch.randperm(rows), offsets, ids, count)
    counts = torch.randint(0, 3, (rows * count,), dtype=torch.int32)
    penalties = 1 + torch.rand(3, rows)
    bias = torch.randn(rows * count)
    expected, got = given.clone(), given.to(args.device)
    on_device = reference.SparseTokens(*(x.to(args.device) for x in tokens[:3]), count)
    reference_sampling.apply_bitmask(expected, mask)
    kernels.apply_bitmask(got, mask.to(args.device))
    checks.equal("mask", got, expected)
    reference.add_bias(expected, tokens, bias)
    kernels.add_bias(got, on_device, bias.to(args.device))
    checks.equal("biases", got, expected)
    reference.apply_penalties(expected, tokens, counts, *penalties)
    kernels.apply_penalties(got, on_device, counts.to(args.device), *penalties.to(args.device))
    if not checks.dry:
        finite = expected.isfinite()
        checks.equal("penalties of masked tokens", got.cpu().isfinite(), finite)
        checks.near("penalties", got.cpu()[finite], expected[finite])
    checks.conclude()


def sampling(args: argparse.Namespace, results: Results) -> None:
    """Draws whose tokens must be the reference's, and logprobs."""
    from trivet_kernels.triton.logprobs import logprobs
    from trivet_kernels.triton.sampling import draw, parameters

    torch.manual_seed(args.seed)
    checks, size = Checks(args, results), 300 if args.quick else 151_936
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.8, 0.0), (1.0, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.1)]
    kinds += [(1.5, 1000, 0.99, 0.001), (2.0, 0, 0.9999, 0.0), (0.6, 0, 0.9, 0.02)]
    for scale in (0.5, 3.0, 12.0):
        rows = len(kinds) if args.quick else 4 * len(kinds)
        given = (torch.randn(rows, size + 64) * scale).to(_dtype(args))
        generator = np.random.default_rng(args.seed)
        temperature, top_k, top_p, min_p = (
            np.array(column * (rows // len(kinds))) for column in zip(*kinds, strict=True)
        )
        columns = {
            "temperature": temperature.astype(np.float32),
            "top_k": top_k.astype(np.int64),
            "top_p": top_p.astype(np.float64),
            "min_p": min_p.astype(np.float64),
            "seeds": generator.integers(-(2**63), 2**63 - 1, rows),
            "positions": generator.integers(0, 5000, rows),
        }
        tokens = torch.randint(0, size, (rows,))
        with poisoned():
            drawn = draw(given.to(args.device), size, parameters(**columns).to(torch.device(args.device)))
            ids, values, ranks = logprobs(given.to(args.device), tokens.to(args.device), 5, size)
        if checks.dry:
            continue
        checks.equal(f"tokens of {rows} rows, deviation {scale}", drawn[0].long(), _drawn(given, size, columns))
        wide = given.double().log_softmax(1)
        checks.near(f"logprobs, deviation {scale}", values.cpu(), wide.gather(1, ids.long().cpu()))
        own = given.gather(1, tokens[:, None])
        checks.equal(f"ranks, deviation {scale}", ranks, (given[:, :size] > own).sum(1).int() + 1)
        order = given[:, :size].float().sort(dim=1, descending=True, stable=True).indices[:, :5]
        checks.equal(f"alternatives, deviation {scale}", ids[:, 1:].long(), order)
    checks.conclude()


def _drawn(given: Tensor, size: int, columns: dict[str, Any]) -> Tensor:
    """The tokens that the reference draws."""
    from trivet_kernels.reference import sampling as reference

    table = {name: torch.from_numpy(column) for name, column in columns.items()}
    expected = reference.argmax(given, size)[0]
    chosen = (table["temperature"] > 0).nonzero()[:, 0]
    block = reference.grouped(given[chosen], size)
    for part in block:
        part.div_(table["temperature"][chosen, None])
    cut = reference.survivors(block, *(table[name][chosen] for name in ("top_k", "top_p", "min_p")))
    expected[chosen] = reference.draw(block, *cut, table["seeds"][chosen], table["positions"][chosen])
    return expected


def _dtype(args: argparse.Namespace) -> torch.dtype:
    return torch.float32 if args.interpret else torch.bfloat16
