"""The role's own suite, in Triton's interpreter."""

from __future__ import annotations

from trivet.testing.suites import AttentionSuite
from trivet_torch.testing import TorchArrays


class TestTriton(TorchArrays, AttentionSuite):
    use = "triton"
