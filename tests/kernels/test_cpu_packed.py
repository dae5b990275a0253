"""Products of a few rows with matrices in oneDNN's layout."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from trivet_kernels.cpu import packed as module
from trivet_kernels.cpu.build import library
from trivet_kernels.cpu.levels import cpu_flags
from trivet_kernels.cpu.packed import packed_rows

# What keeps the library from using matrix tiles, for which it packs in another way.
_LIMIT, _WITHOUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
_HAS_TILES = "amx_bf16" in cpu_flags() and os.environ.get(_LIMIT) != _WITHOUT_TILES


@pytest.mark.skipif(not _HAS_TILES, reason="this processor has no matrix tiles, so the tests run here")
def test_all_of_these_in_a_process_whose_library_uses_no_tiles() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, _LIMIT: _WITHOUT_TILES}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture(autouse=True)
def available(request: pytest.FixtureRequest) -> None:
    if _HAS_TILES:
        if request.function is not test_all_of_these_in_a_process_whose_library_uses_no_tiles:
            pytest.skip("runs in a process whose library uses no matrix tiles")
        return
    found = library()
    if found is None or not found.trivet_has_packed_bf16():
        pytest.skip("this processor has no bfloat16 dot products, or there is no C compiler")


def pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(64, 64), (1, 32), (130, 100), (192, 896), (64, 512), (96, 514), (640, 2050)])
def test_products_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    weight, bias = matrix(*shape), matrix(shape[0], seed=1)
    packed = pack(weight)
    kernel = packed_rows(packed, shape)
    assert kernel is not None
    for rows in (1, 2, 5, 6, 7, 12, 13, 63, 64):
        wide = matrix(rows, shape[1] + 10, seed=rows)
        wide[:, shape[1] :] = float("nan")  # what lies between rows is nobody's business
        x = wide[:, : shape[1]]
        exact = x.double() @ weight.double().T
        for given in (None, bias):
            want = exact if given is None else exact + given.double()
            got = kernel(x, given).double()
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5 * shape[1])


def test_a_row_has_the_same_bits_in_every_batch_and_with_any_number_of_threads() -> None:
    weight, x = matrix(200, 1300), matrix(64, 1300, seed=3)
    packed = pack(weight)
    kernel = packed_rows(packed, (200, 1300))
    assert kernel is not None
    together = kernel(x, None)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for begin, end in ((0, 1), (3, 5), (10, 16), (20, 27), (1, 64)):
                assert torch.equal(kernel(x[begin:end], None), together[begin:end])
    finally:
        torch.set_num_threads(before)


def test_not_a_number_stays_in_its_row() -> None:
    weight, x = matrix(128, 64), matrix(9, 64, seed=5)
    x[4, 7] = float("nan")
    packed = pack(weight)
    kernel = packed_rows(packed, (128, 64))
    assert kernel is not None
    assert kernel(x, None).isnan().all(1).tolist() == [row == 4 for row in range(9)]


def test_a_layout_that_is_not_the_expected_one_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_layouts", lambda: fresh)
    fresh = module._Layouts()
    weight = matrix(128, 64)
    plain = weight.clone()
    # As many bytes in another order: rows one after the other, as a processor without these instructions has them.
    real: Any = torch.ops.mkldnn

    class Ops:
        _nbytes = staticmethod(lambda tensor: plain.nbytes)
        data_ptr = staticmethod(lambda tensor: plain.data_ptr())
        _linear_pointwise = staticmethod(real._linear_pointwise)

    monkeypatch.setattr(module.torch, "ops", type("O", (), {"mkldnn": Ops}))
    assert packed_rows(pack_with(real, weight), (128, 64)) is None


def pack_with(ops: Any, weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = ops._reorder_linear_weight(weight, None)
    return packed


def test_an_odd_number_of_inputs_and_a_matrix_of_zeros_are_left_to_the_library() -> None:
    assert packed_rows(pack(matrix(64, 33)), (64, 33)) is None
    assert packed_rows(pack(torch.zeros(77, 46, dtype=torch.bfloat16)), (77, 46)) is None
    weight = matrix(77, 46)
    assert packed_rows(pack(weight), (77, 46)) is not None


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_a_matrix_that_shows_nothing_decides_nothing(special: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, shape = module._Layouts(), (66, 58)
    monkeypatch.setattr(module, "_layouts", lambda: fresh)
    for useless in (torch.full(shape, special), torch.full(shape, 0.5)):
        assert packed_rows(pack(useless.to(torch.bfloat16)), shape) is None
    assert packed_rows(pack(matrix(*shape)), shape) is not None
    # The shape is known now, so what a matrix holds does not matter.
    weight = matrix(*shape)
    weight[3, 5] = special
    kernel = packed_rows(pack(weight), shape)
    assert kernel is not None
    got = kernel(torch.ones(1, 58, dtype=torch.bfloat16), None)[0]
    assert got.isfinite().tolist() == [output != 3 for output in range(66)]
