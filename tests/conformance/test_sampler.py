"""The fake sampler and the torch sampler pass the suite of their role."""

from __future__ import annotations

from trivet.testing.suites import SamplerSuite
from trivet_torch.testing import TorchArrays


class TestFake(SamplerSuite):
    use = "fake"
    top_k = top_p = min_p = min_tokens = logit_bias = allowed_token_ids = bad_words = False
    repetition_penalty = frequency_penalty = presence_penalty = logprob_token_ids = False


class TestTorch(TorchArrays, SamplerSuite):
    use = "sampler"
