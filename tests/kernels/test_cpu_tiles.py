"""Products of bfloat16 by matrix tiles, against float64."""

from __future__ import annotations

import ctypes
import math
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trivet_kernels.cpu import build, memory, tiles
from trivet_kernels.cpu.memory import room
from trivet_kernels.cpu.ops import NativeOps
from trivet_kernels.cpu.tiles import TiledMatrix

pytestmark = pytest.mark.skipif(not tiles.has_tiles(), reason="this processor, or its compiler, has no matrix tiles")

SHAPES = [(32, 32), (64, 64), (96, 896), (1, 1), (33, 31), (100, 70), (200, 2), (64, 1300), (130, 4864)]
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 70, 200, 300]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def packed(weight: Tensor, bias: Tensor | None = None) -> TiledMatrix:
    made = TiledMatrix(weight.shape[1], weight.shape[0], bias)
    made.put(weight, 0)
    return made


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float64."""
    exact = x.double() @ weight.double().T
    return exact if bias is None else exact + bias.double()


def check(got: Tensor, expected: Tensor, inputs: int) -> None:
    """Sums in float32 in any order, and one rounding."""
    assert got.dtype == torch.bfloat16
    size = math.sqrt(inputs)
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=1e-5 * size)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("threads")
def test_a_product_of_any_number_of_rows(shape: tuple[int, int]) -> None:
    weight, bias = matrix(*shape), matrix(1, shape[0], 1)[0]
    for shift in (None, bias):
        layer = packed(weight, shift)
        for rows in ROWS:
            x = matrix(rows, shape[1], rows)
            check(layer(x), product(x, weight, shift), shape[1])


@pytest.mark.usefixtures("threads")
def test_rows_beyond_what_stays_in_the_cache() -> None:
    weight = matrix(96, 5000)
    layer, x = packed(weight), matrix(1100, 5000, 1)
    got = layer(x)
    check(got, product(x, weight, None), 5000)
    for rows in (1, 32, 40, 130, 600):
        assert torch.equal(layer(x[:rows]), got[:rows]), "a row depends on how many others there are"


def test_a_row_depends_neither_on_the_others_nor_on_threads() -> None:
    layer = packed(matrix(130, 1300), matrix(1, 130, 1)[0])
    x = matrix(300, 1300, 2)
    x[7] = math.nan
    before = torch.get_num_threads()
    results = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results.append(layer(x))
    torch.set_num_threads(before)
    alone = torch.cat([layer(x[row : row + 1]) for row in range(len(x))])
    assert alone[7].isnan().all()
    for got in results:
        assert torch.equal(got.view(torch.int16), alone.view(torch.int16))


def test_rows_may_be_strided_and_results_may_go_into_a_part_of_something() -> None:
    weight = matrix(70, 96)
    layer, wide = packed(weight), matrix(50, 300, 1)
    out = torch.full((50, 200), 7.0, dtype=torch.bfloat16)
    for rows in (20, 50):
        x = wide[:rows, 10:106]
        assert layer(x, out=out[:rows, 100:170]).data_ptr() == out[:rows, 100:170].data_ptr()
        check(out[:rows, 100:170], product(x, weight, None), 96)
    assert (out[:, :100] == 7).all()
    assert (out[:, 170:] == 7).all()


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.usefixtures("threads")
def test_a_gate_gives_the_bits_of_product_and_activation(gate: str) -> None:
    library = build.library()
    assert library is not None
    ops = NativeOps(library)
    for bias in (None, matrix(1, 192, 1)[0]):
        layer = packed(matrix(192, 896), bias)
        assert layer.can_gate
        for rows in (1, 17, 32, 33, 64, 300):
            x = matrix(rows, 896, rows)
            both = layer(x)
            expected = ops.silu_and_mul(both) if gate == "silu" else ops.gelu_and_mul(both, approximate=gate != "gelu")
            assert torch.equal(layer(x, gate), expected)  # type: ignore[arg-type]


def test_only_halves_of_whole_panels_have_a_gate() -> None:
    assert [packed(matrix(rows, 32)).can_gate for rows in (32, 64, 96, 128)] == [False, True, False, True]


def test_parts_are_packed_one_by_one_in_any_order() -> None:
    weight, x = matrix(150, 77), matrix(5, 77, 1)
    layer = TiledMatrix(77, 150)
    for first, last in ((64, 150), (0, 10), (10, 64)):
        layer.put(weight[first:last], first, num_threads=2)
    assert torch.equal(layer(x), packed(weight)(x))


def test_no_rows_give_no_results() -> None:
    assert packed(matrix(40, 32))(matrix(0, 32)).shape == (0, 40)


def test_bytes_are_known_before_there_is_a_matrix() -> None:
    for rows, columns in SHAPES:
        assert TiledMatrix.planned_bytes(rows, columns) == packed(matrix(rows, columns)).num_bytes


@pytest.fixture
def _nothing_else_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_areas", memory._Areas())


@pytest.mark.usefixtures("_nothing_else_has_memory")
def test_memory_for_weights_is_zeros_in_pages_of_its_own() -> None:
    small, large = room(1000), room((5 << 20) + 1)
    assert (len(small), len(large)) == (1000, (5 << 20) + 1)
    assert not small.any()
    assert not large.any()
    assert large.data_ptr() % (2 << 20) == 0


@pytest.mark.usefixtures("_nothing_else_has_memory")
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_of_weights_goes_back_when_the_last_of_them_is_gone() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before, size = resident(), 16 << 20
    parts = [room(size).fill_(1) for _ in range(8)]
    assert resident() > before + 6 * size
    del parts[:-1]
    assert (parts[0] == 1).all()
    assert not room(size).any()
    parts.clear()
    assert resident() < before + 2 * size


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds processes to a limit of address space")
def test_weights_find_memory_where_a_limit_leaves_little_more_than_they_need() -> None:
    script = """
import resource, torch
from trivet_kernels.cpu.memory import room
torch.zeros(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
part = room(4 << 20)
assert len(part) == 4 << 20 and not part.any()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_other_libraries_in_the_thread_keep_their_tiles() -> None:
    """The state is given back: torch's own products, which use tiles of other shapes, are right before and after."""
    a, b = matrix(64, 256), matrix(64, 256, 1)
    expected = torch.nn.functional.linear(a, b)
    layer = packed(matrix(40, 70))
    layer(matrix(3, 70))
    assert torch.equal(torch.nn.functional.linear(a, b), expected)


def test_a_library_without_tiles_says_so() -> None:
    from trivet_kernels.cpu.levels import LEVELS

    generic = build.load(build.build([LEVELS[-1]], build.cache_folder()))
    assert isinstance(generic, ctypes.CDLL)
    assert not generic.trivet_has_tiles()
