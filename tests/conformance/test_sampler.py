"""The fake sampler and the torch sampler pass the suite of their role."""

from __future__ import annotations

from trivet.testing.suites import SamplerSuite
from trivet_torch.testing import TorchArrays


class TestFake(SamplerSuite):
    use = "fake"
    top_k = top_p = min_p = min_tokens = False


class TestTorch(TorchArrays, SamplerSuite):
    use = "sampler"
