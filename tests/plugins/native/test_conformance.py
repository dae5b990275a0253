"""The native model passes the suite of its role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from native_kit import make_model

from trivet.testing.suites import ModelSuite
from trivet_torch.testing import TorchArrays


class _Native(TorchArrays, ModelSuite):
    use = "native"
    attention = "torch"
    case: ClassVar[str]
    network: ClassVar[Any]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _files(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.network = make_model(cls.case)
        cls.model = str(tmp_path_factory.mktemp("model"))
        cls.network.save_pretrained(cls.model)

    def reference_logits(self, tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            logits = self.network(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return np.asarray(logits)


class TestLlama(_Native):
    case = "llama"


class TestGemma3(_Native):
    """Sliding windows of 8 tokens in three of four layers."""

    case = "gemma3"


class TestMixtral(_Native):
    case = "mixtral"


class TestGptOss(_Native):
    """Sinks, and sliding windows of 8 tokens in every other layer."""

    case = "gpt_oss"
