"""Layers and the head in compiled code, with as little of Python around it as there can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trivet_kernels.cpu.block import MAX_PARTS, MULTIPLY, NO_GATE, BlockParts, NativeBlock, Product
from trivet_kernels.cpu.ops import NativeOps
from trivet_kernels.cpu.types import DTYPES
from trivet_native.layers import SLICE, GatedMLP, split_heads
from trivet_torch.allocator import Kept

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.ops import Ops
    from trivet_native.layers import BlockWeights, Scratch
    from trivet_native.spec import DecoderSpec
    from trivet_torch.linear import Linear


class Workspace:
    """Memory for the steps of some number of tokens, which the layers share: views of it are made once and not in every
    layer of every step."""

    def __init__(self, scratch: Scratch, spec: DecoderSpec) -> None:
        self._scratch, self._spec = scratch, spec
        self._rows = -1

    def fit(self, rows: int) -> None:
        """Make it that of steps of ``rows`` tokens."""
        if rows == self._rows:
            return
        spec, get = self._spec, self._scratch.get
        count = min(rows, SLICE)
        qkv = get("qkv", rows, spec.query_size + 2 * spec.kv_size)
        self.split = split_heads(qkv, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.delta = get("delta", rows, spec.hidden_size)
        parts = [get("normed", count, spec.hidden_size), get("projected", count, spec.hidden_size)]
        # Buffers only grow, and one that did is another tensor: these keep what the addresses are of.
        self._kept = [qkv, self.delta, *parts, get("gated", count, spec.intermediate_size)]
        self.qkv, self.delta_address, self.normed, self.projected, self.gated = (t.data_ptr() for t in self._kept)
        self._rows = rows


class FusedBlock:
    """A layer's two pieces around its attention, each in one call. What they return is lost with the next layer's."""

    def __init__(self, block: NativeBlock, owners: Sequence[object], workspace: Workspace, size: int) -> None:
        """``owners`` are what the products of the block belong to; ``size``: of a row that attention returns."""
        self._block, self._owners, self._workspace, self._size = block, owners, workspace, size

    def before(self, residual: Tensor, delta: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`trivet_native.layers.Block.before`."""
        space = self._workspace
        space.fit(residual.shape[0])
        self._block.before(residual, delta, positions.contiguous(), space.normed, space.qkv)
        return space.split

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
        """As :meth:`trivet_native.layers.Block.after`."""
        space = self._workspace
        if attended.dtype is not residual.dtype or not attended.is_contiguous():
            attended = attended.to(residual.dtype).contiguous()
        assert attended.numel() == residual.shape[0] * self._size
        self._block.after(residual, attended, space.normed, space.projected, space.gated, space.delta_address)
        return space.delta


class FusedHead:
    """The output projection, called without detours, into memory that is kept over steps."""

    def __init__(self, head: Linear, product: Product, dtype: torch.dtype, most: int) -> None:
        """``most``: rows up to which their memory is kept; more come seldom, and take much."""
        self._head, self._layer, self._outputs = head, product.layer, product.outputs
        self._function, self._dtype, self._most = MULTIPLY(product.function), dtype, most
        self._kept = Kept(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """``[n, hidden_size]``, dense, to ``[n, vocab_size]``."""
        rows = x.shape[0]
        if rows > self._most or x.dtype is not self._dtype:
            return self._head(x)
        out = self._kept.get(rows, self._outputs)
        if self._function(
            self._layer,
            x.data_ptr(),
            x.stride(0),
            rows,
            out.data_ptr(),
            self._outputs,
            NO_GATE,
            DTYPES[self._dtype],
            torch.get_num_threads(),
        ):
            raise MemoryError(f"no memory to work in for {rows} rows of logits")
        return out

    def release(self) -> None:
        """Give the memory back, if nobody has logits in it."""
        self._kept.release()


def fused_head(head: Linear | None, ops: Ops, dtype: torch.dtype, most: int) -> FusedHead | None:
    """The output projection in compiled code, None where that cannot compute it."""
    products = () if head is None or not isinstance(ops, NativeOps) or dtype not in DTYPES else head.products
    return None if head is None or len(products) != 1 else FusedHead(head, products[0], dtype, most)


def fused_block(
    spec: DecoderSpec, weights: BlockWeights, table: Tensor, ops: Ops, dtype: torch.dtype, workspace: Workspace
) -> FusedBlock | None:
    """The layer in compiled code; None where it has parts that only Python can call, such as experts or products of
    other libraries."""
    mlp = weights.mlp
    if not isinstance(ops, NativeOps) or not isinstance(mlp, GatedMLP) or mlp.fused is None or dtype not in DTYPES:
        return None
    qkv = weights.qkv.products
    ones = [layer.products for layer in (weights.out, mlp.gate_up, mlp.down)]
    if not 1 <= len(qkv) <= MAX_PARTS or any(len(products) != 1 for products in ones):
        return None
    (out,), (gate_up,), (down,) = ones
    if not gate_up.gates:
        return None
    block = NativeBlock(
        ops.library,
        BlockParts(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            gate=mlp.fused,
            attention_norm=weights.attention_norm,
            mlp_norm=weights.mlp_norm,
            attention_output_norm=weights.attention_output_norm,
            mlp_output_norm=weights.mlp_output_norm,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            table=table,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            hidden=spec.hidden_size,
            intermediate=mlp.down.in_features,
            eps=spec.eps,
            dtype=dtype,
            slice=SLICE,
        ),
    )
    return FusedBlock(block, (weights.qkv, weights.out, mlp), workspace, spec.query_size)
