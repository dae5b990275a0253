"""Requests through the whole engine on these kernels, in Triton's interpreter, get the tokens of the attention
``torch``."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_kit import make_model, save

from trivet import LLM, SamplingParams
from trivet.testing.fakes import FakeTokenizer

PROMPTS = [[3 + (7 * i) % 70 for i in range(19)], [5, 9, 40, 11], [7]]


def _tokens(name: str, attention: str) -> list[list[int]]:
    """What requests get whose prompts come in chunks, beside each other's decodes."""
    config = {
        "model": name,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 64,
        "plugins": {
            "attention": {"use": attention},
            "cache": {"memory": "1MiB"},
            "model": {"use": "native"},
            "scheduler": {"max_num_batched_tokens": 8},
        },
    }
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM.from_config(config, [FakeTokenizer()]) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("case", ["gemma3", "gpt_oss"])
def test_tokens_are_those_of_the_attention_torch(tmp_path: Path, case: str) -> None:
    name = save(make_model(case, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]), tmp_path)
    expected = _tokens(name, "torch")
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert _tokens(name, "triton") == expected
