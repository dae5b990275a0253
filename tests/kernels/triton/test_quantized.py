"""Products with weights of four and eight bits in Triton against the float64 reference, and what compilers say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from _compile import TARGETS, Compiled, compile_for
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trivet_kernels.reference.quantized import QuantizedMatrix, quantized_linear
from trivet_kernels.triton.quantized import Geometry, QuantizedLinear, choose_tile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: one rounding of the type (the interpreter cuts bfloat16 off), and sums in float32
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclasses.dataclass(frozen=True)
class Kind:
    """How weights are stored; ``segment`` 0 is the whole row."""

    segment: int
    bits: int
    zero_point: int = 128
    offsets: bool = False
    wide_scale: bool = False


KINDS = {
    "int8": Kind(128, 8, wide_scale=True),
    "int8-64": Kind(64, 8),
    "int8-32": Kind(32, 8),
    "int8-row": Kind(0, 8, wide_scale=True),
    "int4": Kind(32, 4, 0, offsets=True),
    "int4-symmetric": Kind(32, 4, 8),
    "Q2_K": Kind(16, 4, 0, offsets=True),
    "Q3_K": Kind(16, 4, 4),
    "Q5_1": Kind(32, 8, offsets=True),
    "Q6_K": Kind(16, 8),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_matrix(kind: Kind, outputs: int, columns: int) -> QuantizedMatrix:
    """Random integers, the extremes among them, with scales that float16 holds exactly."""
    generator = torch.Generator().manual_seed(outputs + columns)
    segment = kind.segment or -(-columns // 16) * 16
    segments = -(-columns // segment)
    values = torch.randint(0, 1 << kind.bits, (outputs, segments * segment), generator=generator, dtype=torch.uint8)
    values[0, :columns] = torch.arange(columns) % 2 * ((1 << kind.bits) - 1)
    scale, offset = ((random(outputs, segments, seed=seed) * 0.01).half().float() for seed in (1, 2))
    offsets = offset if kind.offsets else None
    return QuantizedMatrix(values, scale, offsets, columns, segment, kind.bits, kind.zero_point)


def pack(kind: Kind, matrix: QuantizedMatrix, bias: Tensor | None = None, **given: Any) -> QuantizedLinear:
    layer = QuantizedLinear(
        matrix.in_features,
        matrix.out_features,
        segment=matrix.segment,
        bits=matrix.bits,
        zero_point=matrix.zero_point,
        offsets=kind.offsets,
        wide_scale=kind.wide_scale,
        bias=bias,
        device="cpu",
        **given,
    )
    layer.put(matrix)
    return layer


def assert_near(got: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[got.dtype]
    # Errors of a sum are as its terms, not as what they come to.
    torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound * expected.abs().max().item())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("outputs", "columns", "dtype"),
    [(1, 1, "fp32"), (7, 33, "fp32"), (64, 128, "fp32"), (130, 300, "fp32"), (70, 200, "bf16"), (70, 200, "fp16")],
)
def test_products(name: str, outputs: int, columns: int, dtype: str) -> None:
    kind = KINDS[name]
    matrix, bias = make_matrix(kind, outputs, columns), random(outputs)
    layer = pack(kind, matrix, bias)
    assert (layer.in_features, layer.out_features) == (columns, outputs)
    for rows in (1, 20):
        x = random(rows, columns).to(DTYPES[dtype])
        got = layer(x)
        assert got.dtype == x.dtype
        assert_near(got, quantized_linear(x, matrix, bias))
    assert_near(pack(kind, matrix)(x), quantized_linear(x, matrix))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    """Bit for bit, though tiles grow with the number of rows."""
    kind, dtype = KINDS[name], torch.bfloat16
    layer = pack(kind, make_matrix(kind, 128, 160), random(128))
    x = random(150, 160).to(dtype)
    many = layer(x)
    form = Geometry.of(160, 128, kind.segment, wide_scale=kind.wide_scale)
    tiles = [choose_tile(rows, form, kind.bits, dtype, "interpreter", aligned=True)[:2] for rows in range(1, 151)]
    assert len(set(tiles)) == 4
    for rows in (*range(1, 71), 128, 129):
        assert torch.equal(layer(x[:rows]), many[:rows])
    for row in (1, 40, 149):
        assert torch.equal(layer(x[row : row + 1])[0], many[row])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rows_may_be_strided_and_what_is_between_them_is_not_read_or_written(name: str) -> None:
    kind = KINDS[name]
    matrix = make_matrix(kind, 40, 100)
    wide, target = torch.full((5, 130), torch.nan), torch.full((5, 50), torch.nan)
    wide[:, 10:110] = random(5, 100)
    x, out = wide[:, 10:110], target[:, 4:44]
    layer = pack(kind, matrix)
    assert layer(x, out) is out
    assert_near(out, quantized_linear(x, matrix))
    assert target[:, :4].isnan().all()
    assert target[:, 44:].isnan().all()
    assert_near(layer(x.T.contiguous().T), quantized_linear(x, matrix))
    assert layer(x[:0]).shape == (0, 40)


def test_a_row_that_is_no_numbers_is_its_own_affair() -> None:
    kind = KINDS["int8"]
    layer = pack(kind, make_matrix(kind, 40, 100))
    x = random(6, 100)
    expected = layer(x)
    x[2] = torch.nan
    got = layer(x)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("name", KINDS)
def test_weights_come_in_pieces(name: str) -> None:
    kind = KINDS[name]
    matrix, x = make_matrix(kind, 70, 96), random(3, 96)
    layer = QuantizedLinear(
        96,
        70,
        segment=matrix.segment,
        bits=kind.bits,
        zero_point=kind.zero_point,
        offsets=kind.offsets,
        wide_scale=kind.wide_scale,
        device="cpu",
    )
    for begin, end in ((33, 70), (0, 33)):
        offset = None if matrix.offset is None else matrix.offset[begin:end]
        layer.put(
            dataclasses.replace(matrix, values=matrix.values[begin:end], scale=matrix.scale[begin:end], offset=offset),
            begin,
        )
    assert torch.equal(layer(x), pack(kind, matrix)(x))


def test_scales_are_multiples_of_a_factor() -> None:
    kind, factor = KINDS["int4"], 2.0**-10
    matrix = make_matrix(kind, 40, 64)
    tiny = dataclasses.replace(matrix, scale=matrix.scale * factor, offset=matrix.offset * factor)
    x = random(3, 64)
    assert_near(pack(kind, tiny, factor=factor)(x), quantized_linear(x, tiny))
    with pytest.raises(OverflowError, match=r"a scale of .* is too large for float16"):
        pack(kind, dataclasses.replace(matrix, scale=matrix.scale * 1e8))
    matrix.scale[21, 1] = torch.nan
    with pytest.raises(ValueError, match="a scale or an offset of row 21 is NaN or infinite"):
        pack(kind, matrix)


def test_groups_that_the_kernel_has_not() -> None:
    for segment in (48, 256):
        with pytest.raises(ValueError, match=f"groups of {segment} values"):
            QuantizedLinear(600, 8, segment=segment, bits=8, zero_point=128, device="cpu")
    with pytest.raises(ValueError, match="groups with offsets"):
        QuantizedLinear(600, 8, segment=128, bits=8, zero_point=128, offsets=True, device="cpu")


@pytest.mark.parametrize(
    ("name", "bits_per_weight"), [("int8", 8.25), ("int8-32", 8.5), ("int4", 5), ("int4-symmetric", 4.5), ("Q6_K", 9)]
)
def test_bytes_per_weight(name: str, bits_per_weight: float) -> None:
    kind = KINDS[name]
    layer = pack(kind, make_matrix(kind, 128, 256), random(128))
    assert layer.weight_bytes == 128 * 256 * bits_per_weight / 8 + 128 * 4
    # Sizes are filled up: outputs to 64, rows of weights to 128.
    arguments = {"segment": kind.segment, "bits": kind.bits, "offsets": kind.offsets, "wide_scale": kind.wide_scale}
    assert QuantizedLinear.planned_bytes(129, 65, **arguments, bias=True) == 128 * 256 * bits_per_weight / 8 + 65 * 4
    assert pack(kind, make_matrix(kind, 65, 129)).weight_bytes == 128 * 256 * bits_per_weight / 8


def test_a_product_asks_the_device_for_nothing() -> None:
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    kind, called = KINDS["int4"], []
    layer, x = pack(kind, make_matrix(kind, 100, 64)), random(20, 64).half()
    launched: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, Recorder():
        patch.setattr("trivet_kernels.triton.quantized.product_kernel", _Launches(launched))
        layer(x)
    assert called == [torch.ops.aten.empty.memory_format]
    assert launched == [(1, 2)]


class _Launches:
    """Stands in for a kernel: the interpreter itself reads tensors."""

    def __init__(self, grids: list[Any]) -> None:
        self._grids = grids

    def __getitem__(self, grid: Any) -> Any:
        self._grids.append(grid)
        return lambda *args, **options: None


def compiled(name: str, rows: int, target: str, dtype: str = "bf16", size: int = 4096) -> Compiled:
    """The kernel as a launch would have it."""
    kind = KINDS[name]
    form = Geometry.of(size, size, kind.segment or size, wide_scale=kind.wide_scale)
    tile = choose_tile(rows, form, kind.bits, DTYPES[dtype], target, aligned=size % 16 == 0)
    scales = "*fp32" if form.wide else "*i32"
    signature = {"out": f"*{dtype}", "x": f"*{dtype}", "values": "*u8", "scale": scales, "bias": "*fp32"}
    integers = ("rows", "in_features", "out_features", "x_row_stride", "out_row_stride", "num_steps", "outputs")
    signature |= dict.fromkeys(integers, "i32")
    constants: dict[str, Any] = {"bits": kind.bits, "zero_point": kind.zero_point, "factor": 2.0**-10}
    constants |= {"chunk": form.chunk, "chunks": 128 // form.chunk, "scale_chunks": form.scale_chunks}
    constants |= {"even": form.values == size, "precision": "ieee", "block_n": tile.block_n, "block_m": tile.block_m}
    if kind.offsets:
        signature["offset"] = scales
    else:
        constants["offset"] = None
    return compile_for(
        "trivet_kernels.triton.quantized:product_kernel",
        signature,
        constants,
        target,
        unaligned=("rows", *(() if size % 16 == 0 else integers)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
        **tile.options,
    )


def check(record: Compiled) -> None:
    # Other GPUs than those of data centres take the tiles of sm_80 and have less memory.
    assert 0 < record.shared <= (99 * 1024 if record.target == "sm_80" else record.shared_limit)
    assert record.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_few_and_many_rows_are_multiplied_by_one_instruction(target: str) -> None:
    records = [compiled("int8", rows, target) for rows in (1, 32, 64, 512)]
    for record in records:
        check(record)
    assert len(records[0].products) == 1
    assert {record.products for record in records} == {records[0].products}


@pytest.mark.parametrize("target", TARGETS)
def test_four_bits_compile_without_spills(target: str) -> None:
    check(compiled("int4", 1, target))


_FULL = [(name, rows, dtype, 4096) for name in KINDS for rows in (1, 32, 64, 512) for dtype in ("bf16", "fp16")]
_FULL += [(name, 64, "fp32", 4096) for name in KINDS] + [
    (name, rows, "bf16", 4001) for name in KINDS for rows in (1, 512)
]


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "rows", "dtype", "size"), _FULL)
def test_all_variants_compile_without_spills(name: str, rows: int, dtype: str, size: int, target: str) -> None:
    check(compiled(name, rows, target, dtype, size))
