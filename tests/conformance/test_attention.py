"""The bundled attention, and the reference itself, pass the suite of their role."""

from __future__ import annotations

from trivet.provider import Provider
from trivet.testing.suites import AttentionSuite
from trivet_torch.testing import TorchArrays


class TestReference(AttentionSuite):
    """The oracle against a second copy of itself: what is tested here is that the suite runs on plain arrays."""

    plugins = (Provider("attention", "reference", "trivet.testing.reference_attention:ReferenceAttention"),)
    use = "reference"
    float_types = ("float32", "float64")
    examples = 3


class TestTorch(TorchArrays, AttentionSuite):
    use = "torch"
    shapes = (*AttentionSuite.shapes, (2, 2, 8, 6))
