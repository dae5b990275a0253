"""What a layer will take, told from its size, is what it then takes, padding included."""

from __future__ import annotations

import pytest
import torch

from trivet_torch.linear import PackedLinear, PlainLinear, can_pack, make_linear, planned_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 63, 64, 65, 127, 128, 130, 200, 1000])
@pytest.mark.parametrize("columns", [1, 8, 33, 64, 100])
def test_on_this_processor(rows: int, columns: int, dtype: torch.dtype) -> None:
    for bias in (None, torch.ones(rows, dtype=dtype)):
        layer = make_linear([torch.ones(rows, columns, dtype=dtype)], [bias], dtype=dtype, device="cpu")
        planned = planned_bytes(rows, columns, bias=bias is not None, dtype=dtype, device="cpu")
        assert planned == layer.weight_bytes


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if can_pack(dtype, "cpu")])
@pytest.mark.parametrize("sizes", [(64, 64, 40), (48, 16, 80), (4000, 500)])
def test_packed_by_onednn(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    layer = PackedLinear([torch.ones(rows, 600, dtype=dtype) for rows in sizes], dtype=dtype)
    assert PackedLinear.planned_bytes(sum(sizes), 600, bias=False, dtype=dtype) == layer.weight_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_torchs_own_layout(dtype: torch.dtype) -> None:
    layer = PlainLinear(torch.ones(70, 33, dtype=dtype), torch.ones(70, dtype=dtype))
    assert PlainLinear.planned_bytes(70, 33, bias=True, dtype=dtype) == layer.weight_bytes
    assert planned_bytes(70, 33, bias=True, dtype=dtype, device="meta") == layer.weight_bytes
