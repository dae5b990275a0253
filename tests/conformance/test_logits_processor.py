"""Two processors of these tests pass the suite of their role, on numpy arrays and on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import conformance_providers
import numpy as np

from trivet.testing.suites import LogitsProcessorSuite
from trivet_torch.testing import TorchArrays


class TestNoRepeat(LogitsProcessorSuite):
    plugins = (conformance_providers,)
    use = "no_repeat"
    cases = ({"no_repeat": 1}, {"no_repeat": 5})
    refused = ({"no_repeat": 0}, {"no_repeat": "many"})

    def reference(self, logits: Any, tokens: Sequence[int], num_prompt: int, params: Any) -> Any:
        for token in tokens[-params.extra_args["no_repeat"] :]:
            logits[token] = -np.inf
        return logits


class TestNoRepeatOnTorch(TorchArrays, TestNoRepeat):
    pass


class TestFlatten(LogitsProcessorSuite):
    plugins = (conformance_providers,)
    use = "flatten"
    options = {"factor": 3.0}
    cases = (None,)
    always = True
