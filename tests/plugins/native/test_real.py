"""Real weights, from GGUF files and folders: the tokens are those of the transformers model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trivet import LLM, SamplingParams

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a village by the sea,"]


def _tokens(path: Path, model: str, dtype: str) -> list[list[int]]:
    config = {"model": str(path), "dtype": dtype, "max_model_len": 256, "plugins": {"model": model}}
    with LLM.from_config(config) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.model
def test_gemma_from_its_gguf_file(demo_model: Path) -> None:
    assert _tokens(demo_model, "native", "float32") == _tokens(demo_model, "transformers", "float32")


@pytest.mark.parametrize("name", ["qwen05/hf", "qwen05/model.gguf", "gemma270/hf"])
def test_the_tokens_of_real_files(real_model: Callable[[str], Path], name: str) -> None:
    path = real_model(name)
    assert _tokens(path, "native", "float32") == _tokens(path, "transformers", "float32")
