"""The two pieces of a decoder's layer around its attention, each in one call of compiled C (csrc/block.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from trivet_kernels.cpu.types import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.ops import Gate

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
#: ``multiply_function`` of csrc/block.h
MULTIPLY = ctypes.CFUNCTYPE(_I, _P, _P, _I, _I, _P, _I, _I, _I, _I)
#: how csrc/block.h numbers the activations of gates
GATES: dict[Gate, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
NO_GATE = 3
#: products side by side that make queries, keys and values
MAX_PARTS = 3
_NO_MEMORY = -1


class Product(NamedTuple):
    """A matrix product as native code calls it. Whoever hands it out keeps the layer alive."""

    function: int  #: address of a ``multiply_function``
    layer: int  #: address of what that takes
    outputs: int  #: size of a row of results, before a gate
    gates: bool  #: whether it computes gated activations, too


class _ProductStruct(ctypes.Structure):
    _fields_: ClassVar = [("multiply", _P), ("layer", _P), ("outputs", _I)]


_NORMS = ("attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm", "query_norm", "key_norm")


class _BlockStruct(ctypes.Structure):
    """``block_t`` of csrc/block.c."""

    _fields_: ClassVar = [
        ("qkv", _ProductStruct * MAX_PARTS),
        ("out", _ProductStruct),
        ("gate_up", _ProductStruct),
        ("down", _ProductStruct),
        *((name, _P) for name in _NORMS),
        ("table", _P),
        *((name, _I) for name in ("table_stride", "num_positions", "width")),
        *((name, _I) for name in ("num_qkv", "heads", "kv_heads", "head_dim", "hidden", "intermediate")),
        *((name, _I) for name in ("gate", "dtype", "slice")),
        ("eps", _F),
    ]


def _struct(product: Product) -> _ProductStruct:
    return _ProductStruct(product.function, product.layer, product.outputs)


@dataclass(frozen=True, slots=True)
class BlockParts:
    """What a layer is made of. Norms are float32 ``[hidden]`` (``[head_dim]`` of queries and keys), or None."""

    qkv: Sequence[Product]  #: side by side: queries, keys, values; at most :data:`MAX_PARTS`
    out: Product
    gate_up: Product  #: can compute ``gate``
    down: Product
    gate: Gate
    attention_norm: Tensor
    mlp_norm: Tensor
    attention_output_norm: Tensor | None
    mlp_output_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    table: Tensor  #: ``[max_positions, R]`` float32: cosines and sines of rotary embeddings
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    eps: float
    dtype: torch.dtype  #: float32 or bfloat16, of all activations
    slice: int  #: tokens that are computed at once outside of attention


class NativeBlock:
    """A layer's pieces; results are those of the operations one by one, bit for bit.

    Args:
        library: As :func:`trivet_kernels.cpu.build.library` returns it.
        parts: What it is made of, which it keeps alive (of products their owners must).
    """

    def __init__(self, library: ctypes.CDLL, parts: BlockParts) -> None:
        assert parts.dtype in DTYPES
        assert 1 <= len(parts.qkv) <= MAX_PARTS
        assert parts.gate_up.gates
        norms = [getattr(parts, name) for name in _NORMS]
        for tensor in (*(norm for norm in norms if norm is not None), parts.table):
            assert tensor.dtype == torch.float32
            assert tensor.stride(-1) == 1
        self._parts = parts
        self.intermediate = parts.intermediate
        self._struct = _BlockStruct(
            (_ProductStruct * MAX_PARTS)(*map(_struct, parts.qkv)),
            *map(_struct, (parts.out, parts.gate_up, parts.down)),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            parts.table.data_ptr(),
            parts.table.stride(0),
            *parts.table.shape,
            len(parts.qkv),
            parts.heads,
            parts.kv_heads,
            parts.head_dim,
            parts.hidden,
            parts.intermediate,
            GATES[parts.gate],
            DTYPES[parts.dtype],
            parts.slice,
            parts.eps,
        )
        self._address = ctypes.addressof(self._struct)
        self._before, self._after = library.trivet_block_before, library.trivet_block_after
        self._before.restype, self._before.argtypes = _I, (_P, _P, _P, _P, _I, _P, _P, _I)
        self._after.restype, self._after.argtypes = _I, (_P, _P, _P, _I, _P, _P, _P, _P, _I)

    def before(self, residual: Tensor, delta: Tensor | None, positions: Tensor, normed: int, qkv: int) -> None:
        """Queries, keys and values.

        Args:
            residual: ``[T, hidden]``, dense; ``delta`` is added to it.
            delta: The same, or None.
            positions: ``[T]`` int64, dense.
            normed: Address of memory for ``[min(T, slice), hidden]``.
            qkv: Address of memory for ``[T, (heads + 2 * kv_heads) * head_dim]``, the result.

        Raises:
            IndexError: A position is not one of the table's.
            MemoryError: There is none to work in.
        """
        failed = self._before(
            self._address,
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            positions.data_ptr(),
            residual.shape[0],
            normed,
            qkv,
            torch.get_num_threads(),
        )
        if failed == _NO_MEMORY:
            raise MemoryError(f"no memory to work in for {residual.shape[0]} tokens")
        if failed:
            raise IndexError(
                f"positions must be in [0, {len(self._parts.table)}), the rows of the table, not "
                f"{int(positions.min())} to {int(positions.max())}"
            )

    def after(self, residual: Tensor, attended: Tensor, normed: int, projected: int, gated: int, delta: int) -> None:
        """What the feed-forward network puts out.

        Args:
            residual: ``[T, hidden]``, dense; attention's output is added to it.
            attended: ``[T, heads * head_dim]``, dense, in any shape.
            normed: Address of memory for ``[min(T, slice), hidden]``.
            projected: The same.
            gated: Address of memory for ``[min(T, slice), intermediate]``.
            delta: Address of memory for ``[T, hidden]``, the result.

        Raises:
            MemoryError: There is none to work in.
        """
        if self._after(
            self._address,
            residual.data_ptr(),
            attended.data_ptr(),
            residual.shape[0],
            normed,
            projected,
            gated,
            delta,
            torch.get_num_threads(),
        ):
            raise MemoryError(f"no memory to work in for {residual.shape[0]} tokens")
