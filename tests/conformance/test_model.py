"""The fake model and the transformers model pass the suite of their role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers

from trivet.testing import fake_model
from trivet.testing.suites import ModelSuite
from trivet_torch.testing import TorchArrays

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


class TestFake(ModelSuite):
    use = "fake"
    options = {"windows": [None, 5, None]}
    attention = "fake"

    def reference_logits(self, tokens: Sequence[int]) -> Any:
        return fake_model.reference_logits(tokens, 64, [None, 5, None])


class _Transformers(TorchArrays, ModelSuite):
    use = "transformers"
    attention = "torch"
    shape: ClassVar[Any]
    network: ClassVar[Any]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _files(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        torch.manual_seed(0)
        cls.network = transformers.AutoModelForCausalLM.from_config(
            cls.shape, attn_implementation="eager", dtype=torch.float32
        ).eval()
        cls.model = str(tmp_path_factory.mktemp("model"))
        cls.network.save_pretrained(cls.model)

    def reference_logits(self, tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            logits = self.network(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return np.asarray(logits)


class TestLlama(_Transformers):
    shape = transformers.LlamaConfig(**SIZES, initializer_range=0.3)


class TestGemma3(_Transformers):
    """Sliding windows of 8 tokens in two of three layers."""

    shape = transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.3,
    )
