"""Products with bfloat16 matrices by the processor's matrix tiles (csrc/linear_tiles.c)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

import torch

from trivet_kernels.cpu import build
from trivet_kernels.cpu.block import GATES, MULTIPLY, NO_GATE, Product
from trivet_kernels.cpu.memory import room
from trivet_kernels.cpu.types import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from trivet_kernels.ops import Gate

_P, _I = ctypes.c_void_p, ctypes.c_int64
#: outputs of a panel and inputs of a step, as in csrc/linear_tiles.c
_PANEL, _STEP = 32, 32
_BFLOAT16 = DTYPES[torch.bfloat16]


class _Layer(ctypes.Structure):
    """``layer_t`` of csrc/linear_tiles.c."""

    _fields_: ClassVar = [("weight", _P), ("bias", _P), ("inputs", _I), ("outputs", _I)]


def has_tiles() -> bool:
    """Whether this processor and the compiled kernels multiply by tiles; compiles if need be."""
    found = build.library()
    return found is not None and bool(found.trivet_has_tiles())


class TiledMatrix:
    """A packed bfloat16 matrix ``[out_features, in_features]``, which begins as zeros and is packed part by part.

    Results are sums in float32 in the order of the inputs, rounded once: a row's depend neither on how many others
    there are nor on the number of threads.

    Args:
        in_features: Size of a row of inputs.
        out_features: Size of a row of results.
        bias: ``[out_features]`` bfloat16, added to results, or None.
        library: The compiled kernels, by default those for this processor, which must have tiles.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: Tensor | None = None,
        *,
        library: ctypes.CDLL | None = None,
    ) -> None:
        library = library or build.library()
        assert library is not None, "shown by has_tiles"
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous() and len(bias) == out_features)
        self.in_features, self.out_features, self.bias = in_features, out_features, bias
        self._pack = library.trivet_tiles_pack
        self._pack.restype, self._pack.argtypes = None, (_P, *[_I] * 4, _P, _I)
        self._weight = room(self.planned_bytes(out_features, in_features))
        self._layer = _Layer(
            self._weight.data_ptr(), None if bias is None else bias.data_ptr(), in_features, out_features
        )
        self._address = ctypes.addressof(self._layer)
        function = ctypes.cast(library.trivet_tiles_multiply, _P).value
        assert function is not None
        #: for native code; valid while this object lives
        self.product = Product(function, self._address, out_features, self.can_gate)
        self._multiply = MULTIPLY(function)

    def put(self, rows: Tensor, first: int, *, num_threads: int = 1) -> None:
        """Pack ``rows`` ``[n, in_features]`` bfloat16, dense, as rows ``first`` and following; several threads may pack
        different ones at once."""
        assert rows.dtype == torch.bfloat16
        assert rows.stride(1) == 1 or rows.shape[1] == 1
        assert first + len(rows) <= self.out_features
        self._pack(
            rows.data_ptr(), rows.stride(0), first, len(rows), self.in_features, self._weight.data_ptr(), num_threads
        )

    def __call__(self, x: Tensor, gate: Gate | None = None, out: Tensor | None = None) -> Tensor:
        """The product with the bias, and what a gated activation makes of it.

        Args:
            x: ``[T, in_features]`` bfloat16 with dense rows.
            gate: None, or the activation of the first half of the outputs, which the second half is multiplied with:
                bit for bit what the product, rounded, and then the activation would give. See :attr:`can_gate`.
            out: ``[T, out_features]``, half as many columns with ``gate``, bfloat16 with dense rows; by default a new
                tensor.

        Raises:
            MemoryError: There is none to arrange the inputs in.
        """
        rows = x.shape[0]
        columns = self.out_features if gate is None else self.out_features // 2
        assert x.shape[1] == self.in_features
        if out is None:
            out = torch.empty(rows, columns, dtype=torch.bfloat16)
        assert out.shape == (rows, columns)
        if self._multiply(
            self._address,
            x.data_ptr(),
            x.stride(0),
            rows,
            out.data_ptr(),
            out.stride(0),
            NO_GATE if gate is None else GATES[gate],
            _BFLOAT16,
            torch.get_num_threads(),
        ):
            raise MemoryError(f"no memory to arrange {rows} rows of {self.in_features} inputs")
        return out

    @property
    def can_gate(self) -> bool:
        """Whether each half of the outputs fills its panels."""
        return self.out_features % (2 * _PANEL) == 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._weight.nbytes

    @staticmethod
    def planned_bytes(out_features: int, in_features: int) -> int:
        """What :attr:`num_bytes` is of a matrix of this size."""
        return -(-out_features // _PANEL) * _PANEL * (-(-in_features // _STEP) * _STEP) * 2
