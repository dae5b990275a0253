"""Real weights through the whole engine: Gemma 3 270M as the demo package brings it, Qwen2.5 0.5B where it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trivet import LLM, SamplingParams
from trivet.hookspecs import hookimpl

LONG = "The history of the lighthouse keeper's village, told by those who lived there: " + " ".join(
    f"In the year {1800 + i} the keeper wrote {i * 7 % 100} letters and counted {i * 13 % 50} ships." for i in range(60)
)


class Keep:
    """Keeps the logits of every sampled row before they are changed."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    @hookimpl(wrapper=True)
    def trivet_sample(self, logits: Any, rows: Any) -> Any:
        self.rows += list(logits.float().cpu().numpy().copy())
        return (yield)


def transformers_model(gguf: Path) -> Any:
    from trivet_torch.weights import load_causal_lm

    model, _ = load_causal_lm(str(gguf), dtype=torch.float32, attn_implementation="eager")
    return model


def test_gemma_agrees_with_transformers_beyond_1200_tokens_of_context(demo_model: Path) -> None:
    keep = Keep()
    plugins = {"cache": {"use": "paged", "memory": "512MiB"}, "scheduler": {"use": "continuous"}}
    config = {"model": str(demo_model), "dtype": "float32", "max_model_len": 2048, "plugins": plugins}
    with LLM.from_config(config, plugins=[keep]) as llm:
        prompt = llm.get_tokenizer().encode(LONG)[:1300]
        assert len(prompt) >= 1200
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
    model = transformers_model(demo_model)
    ids = torch.tensor([[*prompt, *output.token_ids[:-1]]])
    with torch.inference_mode():
        want = model(ids, logits_to_keep=8).logits[0].numpy()
    got = np.stack(keep.rows)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-3
    assert output.token_ids == want.argmax(-1).tolist()


@pytest.mark.parametrize("budget", [100, 4096])
def test_gemma_text_does_not_depend_on_chunks_or_neighbours(demo_model: Path, budget: int) -> None:
    prompts = ["The capital of France is", "def fibonacci(n):", LONG[:600], "Once upon a time"]
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(str(demo_model), dtype="float32", max_model_len=1024, max_num_batched_tokens=budget) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate(p, params, use_tqdm=False)[0] for p in prompts]
    assert [o.outputs[0].text for o in together] == [o.outputs[0].text for o in alone]
    assert "Paris" in together[0].outputs[0].text or "capital" in together[0].outputs[0].text


def test_qwen_knows_the_capital_of_france_and_chats(qwen_model: Path) -> None:
    with LLM(str(qwen_model), dtype="bfloat16", max_model_len=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        completion = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
        assert completion.text.startswith(" Paris")
        messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
        answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0]
        assert answer.text.startswith("Paris")
        assert answer.finish_reason == "stop"


def test_qwen_never_draws_an_id_that_the_tokenizer_lacks(qwen_model: Path) -> None:
    with LLM(str(qwen_model), dtype="bfloat16", max_model_len=2304, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=2.0, max_tokens=500, ignore_eos=True, seed=3, detokenize=False)
        hot = [params.model_copy(update={"temperature": 5.0, "seed": i}) for i in range(4)]
        assert llm.engine.model.vocab_size > llm.get_tokenizer().size, "the model has padding rows"
        outputs = llm.generate(["Hello"] * 4, hot, use_tqdm=False)
        ids = [t for o in outputs for t in o.outputs[0].token_ids]
        assert len(ids) == 2000
        assert max(ids) < llm.get_tokenizer().size


def test_qwen_logits_agree_with_transformers(qwen_model: Path) -> None:
    keep = Keep()
    config = {"model": str(qwen_model), "dtype": "float32", "max_model_len": 512}
    with LLM.from_config(config, plugins=[keep]) as llm:
        prompt = llm.get_tokenizer().encode(LONG)[:300]
        llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    with torch.inference_mode():
        want = transformers_model(qwen_model)(torch.tensor([prompt]), logits_to_keep=1).logits[0].numpy()
    assert np.abs(np.stack(keep.rows) - want).max() <= 1e-3
