"""Linear layers multiply with the matrices they were made of, however those are packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trivet_kernels.cpu import tiles
from trivet_torch import linear as module
from trivet_torch.linear import PackedLinear, PlainLinear, TiledLinear, can_pack, make_linear

PACKABLE = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if can_pack(dtype, "cpu")]


@pytest.fixture(params=["tiles", "onednn"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the processor's matrix tiles, which are for bfloat16, and without."""
    way: str = request.param
    if way == "onednn":
        monkeypatch.setattr(tiles, "has_tiles", lambda: False)
    elif not tiles.has_tiles():
        pytest.skip("this processor has no matrix tiles")
    return way


class Stored:
    """A matrix that is read some rows at a time and remembers what was released."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.shape = values.shape
        self.released: list[tuple[int, int]] = []

    def rows(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]

    def release(self, start: int, stop: int) -> None:
        self.released.append((start, stop))


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + rows)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def check(layer: Any, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """The layer agrees with float64 for several numbers of rows, strided ones too."""
    assert (layer.out_features, layer.in_features) == weight.shape
    exact = weight.to(dtype).double()
    for rows in (1, 2, 3, 7, 16, 65, 300):
        x = matrix(rows, weight.shape[1] + 8, dtype)[:, : weight.shape[1]]
        want = x.double() @ exact.T + (0 if bias is None else bias.to(dtype).double())
        got = layer(x)
        assert got.dtype == dtype
        assert got.shape == want.shape
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    assert layer(x[:0]).shape == (0, weight.shape[0])


@pytest.mark.parametrize("dtype", PACKABLE)
@pytest.mark.parametrize("sizes", [(64, 64, 64), (128, 32), (192,), (48, 16, 80), (1,), (67, 30)])
@pytest.mark.parametrize("columns", [64, 100])
def test_parts_side_by_side(sizes: tuple[int, ...], columns: int, dtype: torch.dtype, way: str) -> None:
    parts = [matrix(size, columns, seed=i) for i, size in enumerate(sizes)]
    biases = [None if i == 1 else matrix(1, size)[0] for i, size in enumerate(sizes)]
    layer = make_linear(parts, biases, dtype=dtype, device="cpu")
    assert isinstance(layer, TiledLinear if way == "tiles" and dtype == torch.bfloat16 else PackedLinear)
    joined = torch.cat([torch.zeros(s) if b is None else b for b, s in zip(biases, sizes, strict=True)])
    check(layer, torch.cat(parts), joined, dtype)
    check(make_linear(parts, dtype=dtype, device="cpu"), torch.cat(parts), None, dtype)


def test_parts_that_are_read_piece_by_piece_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 1)  # as many rows at a time as a block has
    parts = [Stored(matrix(128, 32)), Stored(matrix(200, 32))]
    layer = make_linear(parts, dtype=torch.float32, device="cpu")
    check(layer, torch.cat([part.values for part in parts]), None, torch.float32)
    assert sorted(parts[0].released) == [(0, 64), (64, 128)]
    assert sorted(parts[1].released) == [(0, 64), (64, 128), (128, 192), (192, 200)]


def test_pieces_are_packed_by_several_threads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 1)
    parts = [matrix(640, 64), matrix(320, 64)]
    x = matrix(5, 64)
    one = make_linear(parts, dtype=torch.float32, device="cpu")(x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        three = make_linear(parts, dtype=torch.float32, device="cpu")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(three(x), one)


@pytest.mark.parametrize("rows_of_a_block", [16, 24])
def test_a_layout_that_is_no_sequence_of_the_pieces_is_packed_as_a_whole(
    rows_of_a_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library with other blocks than expected costs a copy, never a wrong product."""
    monkeypatch.setattr(module, "_BLOCK_ROWS", rows_of_a_block)
    monkeypatch.setattr(module, "_PIECE_BYTES", 1)
    parts = [matrix(rows_of_a_block * 7, 64), matrix(100, 64)]
    check(make_linear(parts, dtype=torch.bfloat16, device="cpu"), torch.cat(parts), None, torch.bfloat16)


def test_nothing_of_the_source_is_kept() -> None:
    parts = [matrix(64, 64), matrix(64, 64, seed=1)]
    for layer in (
        make_linear(parts, dtype=torch.float32, device="cpu"),
        make_linear(parts[:1], dtype=torch.float32, device="cpu"),
    ):
        x = matrix(4, 64)
        before = layer(x)
        for part in parts:
            saved = part.clone()
            part.zero_()
            assert torch.equal(layer(x), before)
            part.copy_(saved)


@pytest.mark.parametrize("dtype", PACKABLE)
def test_packed_bytes_are_those_of_the_matrix(dtype: torch.dtype) -> None:
    layer = make_linear([matrix(256, 128), matrix(64, 128)], [matrix(1, 256)[0], None], dtype=dtype, device="cpu")
    assert layer.weight_bytes == (320 * 128 + 320) * dtype.itemsize


@pytest.mark.skipif(torch.bfloat16 not in PACKABLE, reason="oneDNN packs no bfloat16 on this processor")
def test_a_row_does_not_depend_on_how_many_there_are_or_on_threads() -> None:
    layer = make_linear([matrix(192, 200)], [matrix(1, 192)[0]], dtype=torch.bfloat16, device="cpu")
    x = matrix(300, 200, torch.bfloat16)
    want = layer(x)
    for rows in (1, 2, 5, 16, 33, 128):
        assert torch.equal(layer(x[:rows]), want[:rows])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(layer(x), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not tiles.has_tiles(), reason="this processor has no matrix tiles")
def test_tiles_take_other_types_and_answer_in_them() -> None:
    layer = TiledLinear([matrix(64, 64)])
    x = matrix(3, 64)
    assert layer(x).dtype == torch.float32
    assert torch.equal(layer(x), layer(x.to(torch.bfloat16)).float())
    assert layer.gated(x, "silu") is None


@pytest.mark.parametrize("half", [32, 40])
def test_a_layer_computes_a_gated_activation_if_it_can(half: int, way: str) -> None:
    """Halves of whole panels by tiles; anything else is left to the caller."""
    layer = make_linear([matrix(half, 64), matrix(half, 64, seed=1)], dtype=torch.bfloat16, device="cpu")
    for rows in (3, 40):
        x = matrix(rows, 70, torch.bfloat16)[:, 3:67]
        out = torch.empty(rows, half, dtype=torch.bfloat16)
        got = layer.gated(x, "gelu_tanh", out)
        if way == "onednn" or half % 32:
            assert got is None
            continue
        gate, up = layer(x).float().chunk(2, dim=1)
        assert got is out
        want = torch.nn.functional.gelu(gate, approximate="tanh") * up
        torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=1e-3)


def test_without_onednn_the_layer_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_pack", lambda dtype, device: False)
    parts = [Stored(matrix(70, 32)), matrix(30, 32)]
    layer = make_linear(parts, [matrix(1, 70)[0], None], dtype=torch.float32, device="cpu")
    assert isinstance(layer, PlainLinear)
    bias = torch.cat([matrix(1, 70)[0], torch.zeros(30)])
    check(layer, torch.cat([parts[0].values, parts[1]]), bias, torch.float32)
    assert layer.weight_bytes == (100 * 32 + 100) * 4
    assert parts[0].released == [(0, 70)]


def test_what_cannot_be_packed() -> None:
    assert not can_pack(torch.float64, "cpu")
    assert not can_pack(torch.bfloat16, "meta")
    layer = make_linear([matrix(8, 4)], dtype=torch.float64, device="cpu")
    assert isinstance(layer, PlainLinear)
    assert layer(matrix(2, 4, torch.float64)).dtype == torch.float64
