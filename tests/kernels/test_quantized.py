"""The reference for products with weights of few bits."""

from __future__ import annotations

import pytest
import torch

from trivet_kernels.reference.quantized import QuantizedMatrix, quantize_activations, quantized_linear


def test_what_a_matrix_stands_for() -> None:
    values = torch.arange(64, dtype=torch.uint8).view(2, 32) % 16
    scale = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    offset = torch.tensor([[0.0, -1.0], [10.0, 0.0]])
    matrix = QuantizedMatrix(values, scale, offset, in_features=30, segment=16, bits=4, zero_point=8)
    found = matrix.dequantized()
    assert found.shape == (2, 30)
    for row, column in ((0, 3), (0, 20), (1, 15), (1, 29)):
        segment = column // 16
        expected = scale[row, segment] * (int(values[row, column]) - 8) + offset[row, segment]
        assert found[row, column] == expected
    assert matrix.out_features == 2


def test_products() -> None:
    values = torch.tensor([[128 + 1] * 16, [128 - 2] * 16], dtype=torch.uint8)
    matrix = QuantizedMatrix(values, torch.tensor([[1.0], [0.5]]), None, 16, 16, 8, 128)
    x = torch.arange(16.0).expand(3, 16)
    assert quantized_linear(x, matrix, torch.tensor([1.0, 0.0])).tolist() == [[121.0, -120.0]] * 3


@pytest.mark.parametrize(("bits", "steps"), [(8, 1), (16, 254)])
def test_activations_are_at_most_half_a_step_off(bits: int, steps: int) -> None:
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    x[:, ::37] *= 20
    largest = torch.nn.functional.pad(x, (0, 28)).view(5, 4, 32).abs().amax(-1).repeat_interleave(32, 1)[:, :100]
    found = quantize_activations(x, 32, bits)
    assert found.shape == x.shape
    assert ((found - x).abs() <= largest / 127 / steps * 0.51).all()
    assert found.abs().amax() == pytest.approx(x.abs().amax().item())


def test_zeros_stay_zeros() -> None:
    assert quantize_activations(torch.zeros(2, 64), 32).eq(0).all()
