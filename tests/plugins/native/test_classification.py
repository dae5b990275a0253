"""Models with a head for scores of sequences, and pooled hidden states, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_kit import CASES, LONGEST, make_model, save

from trivet import LLM, ModelLoadError, PoolingParams, RequestError
from trivet.testing.fakes import FakeTokenizer

LONG = [3 + (7 * i) % 70 for i in range(37)]
PROMPTS = [LONG, LONG[:5], [9], LONG[:36], LONG[::-1][:16]]


def make_classifier(case: str, folder: Path, labels: int, **changes: Any) -> Any:
    """A random classifier in float32, saved in ``folder``."""
    import transformers
    from native_kit import _COMMON

    name, own = CASES[case]
    config = getattr(transformers, name)(**(_COMMON | own | changes), num_labels=labels)
    torch.manual_seed(5)
    model = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.train(mode=False).save_pretrained(folder)
    return model


def start(folder: Any, **roles: Any) -> LLM:
    """An engine that takes the longest prompt in several steps and finds beginnings of prompts in its cache."""
    plugins = {
        "model": "native",
        "cache": {"use": "paged", "block_size": 4},
        "scheduler": {"use": "continuous", "max_num_batched_tokens": 15, "max_num_seqs": 4},
    }
    config = {"model": str(folder), "max_model_len": LONGEST, "dtype": "float32", "device": "cpu"}
    return LLM.from_config(config | {"plugins": plugins | roles}, [FakeTokenizer()])


def expected_scores(model: Any, prompt: list[int]) -> np.ndarray[Any, Any]:
    """Transformers' logits ``[num_labels]``."""
    with torch.inference_mode():
        scores: np.ndarray[Any, Any] = model(input_ids=torch.tensor([prompt])).logits[0].numpy()
    return scores


@pytest.mark.parametrize("case", ["qwen2", "llama", "gemma3"])
def test_probabilities_of_classes_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    model = make_classifier(case, tmp_path, 3)
    with start(tmp_path) as llm:
        assert llm.engine.model.tasks == ("embed", "classify")
        assert llm.engine.model.architecture == type(model).__name__
        raw = PoolingParams(task="classify", use_activation=False)
        outputs = llm.classify(PROMPTS * 2, [PoolingParams()] * 5 + [raw] * 5, use_tqdm=False)
        assert any(o.num_cached_tokens for o in outputs), "some prompts begin alike"
        for prompt, output, plain in zip(PROMPTS, outputs[:5], outputs[5:], strict=True):
            scores = expected_scores(model, prompt)
            np.testing.assert_allclose(plain.outputs.probs, scores, atol=1e-5)
            powers = np.exp(scores - scores.max())
            np.testing.assert_allclose(output.outputs.probs, powers / powers.sum(), atol=1e-5)
            assert (output.outputs.num_classes, output.error) == (3, None)
        with pytest.raises(RequestError, match="generates no text; its tasks are embed, classify"):
            llm.generate([LONG], use_tqdm=False)
        with pytest.raises(RequestError, match="has 3 classes and no single score; use LLM.classify"):
            llm.score("a", "b", use_tqdm=False)


def test_a_model_of_several_labels_gives_each_its_own_probability(tmp_path: Path) -> None:
    model = make_classifier("qwen2", tmp_path, 2, problem_type="multi_label_classification")
    with start(tmp_path) as llm:
        (output,) = llm.classify(LONG, use_tqdm=False)
        np.testing.assert_allclose(output.outputs.probs, 1 / (1 + np.exp(-expected_scores(model, LONG))), atol=1e-5)


def test_a_single_score_is_a_probability_and_pairs_are_read_as_one_prompt(tmp_path: Path) -> None:
    model = make_classifier("llama", tmp_path, 1)
    tokenizer = FakeTokenizer()
    with start(tmp_path) as llm:
        assert llm.engine.model.tasks == ("embed", "classify", "score")
        one, many = "Hello", ["world", "you", "Hello"]
        found = llm.score(one, many, use_tqdm=False)
        raw = llm.score(
            [one] * 3, many, pooling_params=PoolingParams(task="score", use_activation=False), use_tqdm=False
        )
        for other, output, plain in zip(many, found, raw, strict=True):
            ids = [*tokenizer.encode(one), *tokenizer.encode(other)]
            score = float(expected_scores(model, ids)[0])
            assert plain.outputs.score == pytest.approx(score, abs=1e-5)
            assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-score)), abs=1e-5)
            assert output.prompt_token_ids == ids
        (same,) = llm.score(tokenizer.encode(one), [tokenizer.encode(many[0])], use_tqdm=False)
        assert same.outputs.score == pytest.approx(found[0].outputs.score, abs=1e-6)


def test_a_regression_is_no_probability(tmp_path: Path) -> None:
    model = make_classifier("llama", tmp_path, 1, problem_type="regression")
    with start(tmp_path) as llm:
        (output,) = llm.classify(LONG, use_tqdm=False)
        np.testing.assert_allclose(output.outputs.probs, expected_scores(model, LONG), atol=1e-5)


@pytest.mark.parametrize("case", ["qwen2", "gemma3"])
@pytest.mark.parametrize("caching", [True, False])
def test_embeddings_of_every_kind_are_made_of_transformers_hidden_states(
    tmp_path: Path, case: str, caching: bool
) -> None:
    model = make_model(case)
    with start(save(model, tmp_path), cache={"use": "paged", "block_size": 4, "prefix_caching": caching}) as llm:
        wanted = [
            PoolingParams(pooling_type=kind, normalize=scaled, dimensions=size)
            for kind in ("last", "MEAN", "cls", None)
            for scaled in (True, False, None)
            for size in (None, 8)
        ]
        for prompt in (*PROMPTS, LONG):
            with torch.inference_mode():
                states = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0].numpy()
            for params, output in zip(wanted, llm.embed([prompt] * len(wanted), wanted, use_tqdm=False), strict=True):
                vector = {"mean": states.mean(0), "cls": states[0]}.get(params.pooling_type or "last", states[-1])
                vector = vector[: params.dimensions]
                if params.normalize is not False:
                    vector = vector / np.linalg.norm(vector)
                np.testing.assert_allclose(output.outputs.embedding, vector, atol=2e-5)
                if params.pooling_type in {"mean", "cls"}:
                    assert output.num_cached_tokens == 0, "states that were not computed cannot be pooled"
        stats = llm.engine.parts.cache.stats()
        assert stats.free == stats.total


def test_cosines_of_embeddings(tmp_path: Path) -> None:
    model = make_model("llama")
    with start(save(model, tmp_path)) as llm:
        found = llm.score(LONG, PROMPTS, use_tqdm=False)
        with torch.inference_mode():
            states = [model.model(input_ids=torch.tensor([p])).last_hidden_state[0, -1] for p in PROMPTS]
        for output, state in zip(found, states, strict=True):
            cosine = float(torch.nn.functional.cosine_similarity(states[0], state, dim=0))
            assert output.outputs.score == pytest.approx(cosine, abs=1e-5)
        each = llm.score(PROMPTS, PROMPTS, use_tqdm=False)
        assert [o.outputs.score for o in each] == pytest.approx([1.0] * len(PROMPTS), abs=1e-6)
        with pytest.raises(RequestError, match=r"one and any number, or equally many of both; got 2 and 3"):
            llm.score(["a", "b"], ["a", "b", "c"], use_tqdm=False)
        with pytest.raises(RequestError, match=r"'classify' is not one of this model's: generate, embed"):
            llm.classify(LONG, use_tqdm=False)
        with pytest.raises(RequestError, match="dimensions: 33 exceeds the 32"):
            llm.embed(LONG, PoolingParams(dimensions=33), use_tqdm=False)


def test_the_transformers_provider_refuses_heads_for_classes(tmp_path: Path) -> None:
    make_classifier("qwen2", tmp_path, 2)
    with pytest.raises(ModelLoadError, match=r"this is Qwen2ForSequenceClassification; the native plugin serves"):
        start(tmp_path, model="transformers")
