"""The native products with weights of few bits, compiled for every level that this processor has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trivet_kernels.cpu import build
from trivet_kernels.cpu.levels import LEVELS, usable_levels
from trivet_kernels.cpu.linear import QuantizedLinear, round_to_four
from trivet_kernels.cpu.ops import NativeOps
from trivet_kernels.ops import Gate
from trivet_kernels.reference.quantized import QuantizedMatrix, quantized_linear

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
pytestmark = needs_compiler

# bits, segment, offsets, wide scales, group of activations
FORMATS = {
    "8 bits per row": (8, None, False, True, None),
    "8 bits per row, activations in 64": (8, None, False, True, 64),
    "8 bits in 128": (8, 128, False, True, 128),
    "8 bits in 32": (8, 32, False, False, 32),
    "8 bits in 32, offsets": (8, 32, True, False, 64),
    "8 bits in 16": (8, 16, False, False, 32),
    "8 bits in 80": (8, 80, False, True, 80),
    "4 bits in 32": (4, 32, False, False, 32),
    "4 bits in 32, offsets": (4, 32, True, False, 32),
    "4 bits in 16, offsets": (4, 16, True, False, None),
}


@pytest.fixture(scope="module", params=[level.name for level in LEVELS])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    level = next((level for level in usable_levels() if level.name == request.param), None)
    if level is None:
        pytest.skip(f"this processor has no {request.param}")
    return build.load(build.build([level], tmp_path_factory.getbasetemp().parent / "kernels"))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrix(out: int, columns: int, name: str, seed: int = 0) -> QuantizedMatrix:
    bits, segment, offsets, _, _ = FORMATS[name]
    segment = segment or -(-columns // 16) * 16
    segments = -(-columns // segment)
    generator = torch.Generator().manual_seed(seed)

    def floats() -> Tensor:
        return (torch.rand(out, segments, generator=generator) * 0.02 + 0.001).half().float()

    values = torch.randint(0, 2**bits, (out, segments * segment), generator=generator, dtype=torch.uint8)
    zero_point = 128 if bits == 8 else 3 if offsets else 8
    return QuantizedMatrix(values, floats(), -floats() if offsets else None, columns, segment, bits, zero_point)


def packed(given: QuantizedMatrix, name: str, library: ctypes.CDLL, **more: object) -> QuantizedLinear:
    _, _, _, wide, group = FORMATS[name]
    return QuantizedLinear.of(given, wide_scale=wide, act_group=group, library=library, **more)


def group_of(given: QuantizedMatrix, name: str) -> int:
    group = FORMATS[name][4]
    # A group that is longer than the row is the row, with what fills its last segment.
    whole = given.values.shape[1]
    return whole if group is None or group > whole else group


def activations(rows: int, columns: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """With a few large values, as decoders have, in rows that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns + 5, generator=generator)
    x[:, ::37] *= 20
    return x.to(dtype)[:, :columns]


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    whole = torch.full((rows, columns + 6), float("nan"), dtype=dtype)
    return whole, whole[:, 2 : 2 + columns]


def assert_close(results: Tensor, expected: Tensor, x: Tensor, given: QuantizedMatrix) -> None:
    """Up to the rounding of a few sums in float32 of terms that may cancel."""
    terms = given.values.double().sub(given.zero_point).abs().view(*given.scale.shape, -1) * given.scale.unsqueeze(-1)
    if given.offset is not None:
        terms += given.offset.abs().unsqueeze(-1)
    size = x.double().abs() @ terms.flatten(1)[:, : given.in_features].T
    assert (results - expected).abs().le(3e-7 * size + 1e-6).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "out", "columns"), [(1, 48, 64), (7, 33, 200), (19, 96, 1000), (130, 7, 40)])
def test_equals_the_reference(library: ctypes.CDLL, name: str, rows: int, out: int, columns: int) -> None:
    given = matrix(out, columns, name)
    bias = torch.linspace(-1, 1, out)
    x = activations(rows, columns)
    whole, results = poisoned(rows, out, torch.float32)
    layer = packed(given, name, library, bias=bias)
    assert layer(x, results) is results
    expected = quantized_linear(x, given, bias, act_group=group_of(given, name))
    assert_close(results, expected, x, given)
    assert whole[:, :2].isnan().all()
    assert whole[:, -4:].isnan().all()
    assert layer(x).equal(results)


@pytest.mark.parametrize("rows", [*range(1, 50), 64, 65, 97, 128, 200])
def test_any_number_of_rows(library: ctypes.CDLL, rows: int) -> None:
    given = matrix(64, 96, "4 bits in 32, offsets")
    x = activations(rows, 96)
    expected = quantized_linear(x, given, act_group=32)
    results = packed(given, "4 bits in 32, offsets", library)(x)
    assert_close(results, expected, x, given)


@pytest.mark.parametrize("act_bits", [8, 16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_the_same_among_any_number(library: ctypes.CDLL, name: str, act_bits: int) -> None:
    """Bit for bit, whichever kernel a number of rows is multiplied by."""
    layer = packed(matrix(75, 720, name), name, library, act_bits=act_bits, bias=torch.linspace(-1, 1, 75))
    x = activations(150, 720)
    x[40] *= 1e30
    x[41] = float("inf")
    x[42, 3] = float("nan")
    one_by_one = torch.cat([layer(x[i : i + 1]) for i in range(150)])
    for rows in (5, 8, 13, 16, 17, 31, 32, 33, 47, 64, 81, 150):
        for first in (0, 150 - rows):
            assert torch.equal(
                layer(x[first : first + rows]).view(torch.int32), one_by_one[first : first + rows].view(torch.int32)
            )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gate_is_the_operation_after_the_product(
    library: ctypes.CDLL, activation: Gate, dtype: torch.dtype, bias: bool, threads: None
) -> None:
    ops = NativeOps(library)
    for name in ("8 bits in 128", "4 bits in 32, offsets", "8 bits per row, activations in 64"):
        given = matrix(192, 200, name)
        layer = packed(given, name, library, bias=torch.linspace(-2, 2, 192) if bias else None)
        for rows in (1, 6, 7, 40, 130):
            x = (activations(rows, 200) * 0.1).to(dtype)
            product = layer(x)
            expected = (
                ops.silu_and_mul(product)
                if activation == "silu"
                else ops.gelu_and_mul(product, approximate=activation == "gelu_tanh")
            )
            whole, results = poisoned(rows, 96, dtype)
            for threads_ in (1, 2):
                torch.set_num_threads(threads_)
                assert layer.gated(x, activation, results) is results
                assert results.equal(expected)
                assert whole[:, :2].isnan().all()
                assert whole[:, -4:].isnan().all()
            gated = layer.gated(x, activation)
            assert gated is not None
            assert gated.equal(expected)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_many_inputs(library: ctypes.CDLL, name: str, threads: None) -> None:
    """Products whose totals wait while inputs, panels and rows are taken piece by piece are those of single rows."""
    given = matrix(192, 2200, name)
    layer = packed(given, name, library, bias=torch.linspace(-2, 2, 192))
    x = activations(140, 2200) * 0.1
    product = torch.cat([layer(x[i : i + 1]) for i in range(140)])
    gated = NativeOps(library).silu_and_mul(product)
    assert_close(
        product, quantized_linear(x, given, torch.linspace(-2, 2, 192), act_group=group_of(given, name)), x, given
    )
    for rows in (20, 45, 140):
        for threads_ in (1, 2):
            torch.set_num_threads(threads_)
            assert layer(x[:rows]).equal(product[:rows])
            found = layer.gated(x[:rows], "silu")
            assert found is not None
            assert found.equal(gated[:rows])


@pytest.mark.parametrize("offsets", ["", ", offsets"])
def test_a_few_rows_that_are_left_over(library: ctypes.CDLL, offsets: str) -> None:
    """Of a row of many inputs they are divided in another way than the many rows before them."""
    name = f"8 bits in 32{offsets}"
    given = matrix(64, 14336, name)
    x = activations(385, 14336)
    layer = packed(given, name, library, act_bits=16)
    assert layer(x)[-2:].equal(torch.cat([layer(x[i : i + 1]) for i in (383, 384)]))


def test_a_gate_with_two_bytes_for_activations(library: ctypes.CDLL) -> None:
    layer = packed(matrix(64, 96, "8 bits in 32"), "8 bits in 32", library, act_bits=16)
    for rows in (2, 37):
        x = activations(rows, 96) * 0.1
        gated = layer.gated(x, "silu")
        assert gated is not None
        assert gated.equal(NativeOps(library).silu_and_mul(layer(x)))


def test_half_precision_is_converted_on_both_sides(library: ctypes.CDLL) -> None:
    """Results go where they are wanted in any type; a gate is left to the operation after the product."""
    name = "4 bits in 32"
    layer = packed(matrix(64, 96, name), name, library)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).half()
    want = layer(x.float()).half()
    wide = torch.full((5, 100), 7.0, dtype=torch.float16)
    assert torch.equal(layer(x), want)
    assert torch.equal(layer(x, wide[:, 20:84]), want)
    assert torch.equal(wide[:, 20:84], want)
    assert (wide[:, :20] == 7).all()
    assert (wide[:, 84:] == 7).all()
    assert layer.gated(x, "silu") is None


def test_no_gate_for_halves_that_are_not_whole_panels(library: ctypes.CDLL) -> None:
    layer = packed(matrix(96, 64, "8 bits in 32"), "8 bits in 32", library)
    assert layer.gated(activations(3, 64), "silu") is None


@pytest.mark.parametrize("name", ["8 bits in 32", "4 bits in 32, offsets"])
def test_sixteen_bits_for_activations(library: ctypes.CDLL, name: str) -> None:
    given = matrix(40, 200, name)
    x = activations(21, 200)
    results = packed(given, name, library, act_bits=16)(x)
    expected = quantized_linear(x, given, act_group=32, act_bits=16)
    assert_close(results, expected, x, given)
    exact = quantized_linear(x, given)
    coarse = quantized_linear(x.bfloat16(), given)
    assert (results - exact).norm() <= 0.1 * (coarse - exact).norm()


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16(library: ctypes.CDLL, name: str) -> None:
    given = matrix(70, 160, name)
    x = activations(11, 160, dtype=torch.bfloat16)
    layer = packed(given, name, library)
    wide = layer(x.float())
    assert layer(x).equal(wide.bfloat16())
    _, mixed = poisoned(11, 70, torch.float32)
    assert layer(x, mixed).equal(wide)
    assert layer(x.half()).equal(layer(x.half().float()).half())


def test_columns_that_are_not_contiguous(library: ctypes.CDLL) -> None:
    layer = packed(matrix(32, 64, "8 bits in 32"), "8 bits in 32", library)
    x = activations(6, 128)
    assert layer(x[:, ::2]).equal(layer(x[:, ::2].contiguous()))


@pytest.mark.parametrize("name", ["8 bits per row", "4 bits in 32"])
def test_no_rows(library: ctypes.CDLL, name: str) -> None:
    assert packed(matrix(32, 64, name), name, library)(torch.zeros(0, 64)).shape == (0, 32)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_depend_on_neither_neighbours_nor_threads(library: ctypes.CDLL, name: str, threads: None) -> None:
    layer = packed(matrix(200, 320, name), name, library)
    x = activations(37, 320)
    torch.set_num_threads(1)
    together = layer(x)
    for first, last in ((0, 1), (5, 8), (30, 37)):
        assert layer(x[first:last]).equal(together[first:last])
    torch.set_num_threads(2)
    assert layer(x).equal(together)


def test_more_rows_than_are_rounded_at_a_time(library: ctypes.CDLL) -> None:
    given = matrix(16, 8192, "8 bits in 128")
    x = activations(230, 8192)
    results = packed(given, "8 bits in 128", library)(x)
    expected = quantized_linear(x, given, act_group=128)
    assert_close(results, expected, x, given)


def test_extreme_values_do_not_saturate(library: ctypes.CDLL) -> None:
    """Pairs of the largest products are beyond 16 bits, sums over a long row near the end of 32."""
    columns = 65536
    values = torch.full((3, columns), 255, dtype=torch.uint8)
    values[1] = 0
    values[2, ::2] = 0
    given = QuantizedMatrix(values, torch.ones(3, 1), None, columns, columns, 8, 128)
    x = torch.stack([torch.ones(columns), -torch.ones(columns), torch.tensor([1.0, -1.0]).repeat(columns // 2)])
    results = QuantizedLinear.of(given, wide_scale=True, library=library)(x)
    expected = x.double() @ given.dequantized(torch.float64).T
    assert_close(results, expected, x, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_row_only(library: ctypes.CDLL, value: float, dtype: torch.dtype) -> None:
    layer = packed(matrix(48, 96, "8 bits in 32"), "8 bits in 32", library)
    x = activations(9, 96, dtype=dtype).clone()
    good = layer(x)
    for column in (0, 40, 95):
        bad = x.clone()
        bad[4, column] = value
        results = layer(bad)
        assert not results[4].isfinite().any()
        assert torch.cat([results[:4], results[5:]]).equal(torch.cat([good[:4], good[5:]]))


def test_zeros_give_the_bias(library: ctypes.CDLL) -> None:
    bias = torch.arange(40.0)
    layer = packed(matrix(40, 64, "4 bits in 32, offsets"), "4 bits in 32, offsets", library, bias=bias)
    assert layer(torch.zeros(2, 64)).equal(bias.expand(2, 40))


@pytest.mark.parametrize("name", ["8 bits in 32", "4 bits in 32, offsets"])
def test_parts_that_are_packed_one_by_one(library: ctypes.CDLL, name: str) -> None:
    given = matrix(75, 64, name)
    whole = packed(given, name, library)
    bits, segment, offsets, wide, group = FORMATS[name]
    parts = QuantizedLinear(
        64, 75, segment=segment, bits=bits, zero_point=given.zero_point, offsets=offsets, wide_scale=wide,
        act_group=group, library=library,
    )  # fmt: skip
    for first, last in ((0, 10), (10, 43), (43, 75)):
        offset = None if given.offset is None else given.offset[first:last]
        part = QuantizedMatrix(
            given.values[first:last], given.scale[first:last], offset, 64, segment, bits, given.zero_point
        )
        parts.put(part, first)
    x = activations(5, 64)
    assert parts(x).equal(whole(x))


def test_bytes_of_weights(library: ctypes.CDLL) -> None:
    rows = packed(matrix(64, 256, "8 bits per row"), "8 bits per row, activations in 64", library)
    assert rows.weight_bytes == 64 * 256 + 64 * 4
    eight = packed(matrix(64, 256, "8 bits in 32"), "8 bits in 32", library, bias=torch.zeros(64))
    assert eight.weight_bytes == 64 * 256 + 64 * 8 * 2 + 64 * 4
    four = packed(matrix(64, 256, "4 bits in 32, offsets"), "4 bits in 32, offsets", library)
    assert four.weight_bytes == 64 * 128 + 2 * 64 * 8 * 2


@pytest.mark.parametrize("offsets", [True, False])
def test_rounding_to_four_bits(library: ctypes.CDLL, offsets: bool) -> None:
    groups = torch.randn(40, 5, 32, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.02
    groups[3] = 0
    groups[4] = 0.7
    found = round_to_four(groups, offsets=offsets, library=library)
    assert found is not None
    values, scale, offset = found
    assert (offset is not None) == offsets
    assert values.max() <= 15
    shift = torch.tensor(8) if offset is None else offset.unsqueeze(-1)
    levels = values.float() - shift if offset is None else values.float()
    back = levels * scale.unsqueeze(-1) + (0 if offset is None else shift)
    assert back[3:5].sub(groups[3:5]).abs().max() < 1e-6
    # Levels from end to end of a group, without a search.
    low, high = groups.aminmax(dim=-1, keepdim=True)
    if not offsets:
        high = groups.abs().amax(-1, keepdim=True) * (7.5 / 7)
        low = -high
    step = ((high - low) / 15).clamp(min=1e-9)
    start = low if offsets else torch.zeros(())
    plain = ((groups - start) / step).round() * step + start
    assert (back - groups).norm() < 0.97 * (plain - groups).norm()
    # The scale fits what was rounded: no other is better.
    for change in (0.999, 1.001):
        other = levels * scale.unsqueeze(-1) * change + (0 if offset is None else shift)
        assert (other - groups).square().sum(-1).ge((back - groups).square().sum(-1) - 1e-9).all()


def test_rounding_what_is_not_finite(library: ctypes.CDLL) -> None:
    groups = torch.ones(3, 1, 32)
    groups[0, 0, 5] = float("nan")
    groups[1, 0, 6] = float("inf")
    for offsets in (True, False):
        found = round_to_four(groups, offsets=offsets, library=library)
        assert found is not None
        assert found[1].flatten().isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("part", ["scale", "offset"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_told_from_large_ones(part: str, value: float) -> None:
    given = matrix(40, 64, "4 bits in 32, offsets")
    layer = QuantizedLinear(64, 50, segment=32, bits=4, zero_point=given.zero_point, offsets=True)
    getattr(given, part)[7, 1] = value
    with pytest.raises(ValueError, match=r"of row 17 is NaN or infinite"):
        layer.put(given, 10)
    getattr(given, part)[7, 1] = 1e6
    with pytest.raises(OverflowError, match=r"1e\+06 is too large for float16"):
        layer.put(given, 10)
