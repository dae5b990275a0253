"""A model in float32 over a KV cache of 8-bit floats, through the whole engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from worker_kit import make_model, save_model

from trivet import LLM, SamplingParams
from trivet.engine import Engine
from trivet.testing.fakes import FakeTokenizer

HEAD = [3 + (7 * i) % 60 for i in range(37)]
PROMPTS = [HEAD + [5 + i, 9, 2 + 3 * i][: i % 4] for i in range(6)] + [HEAD[:16], HEAD[:33]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers with a window and layers without."""
    return save_model(make_model("gemma3", vocab_size=FakeTokenizer().size), tmp_path_factory.mktemp("gemma3"))


def tokens(
    model: str, *, budget: int = 64, repeat: int = 1, flat: Mapping[str, Any] | None = None, **cache: Any
) -> tuple[list[list[int]], Engine]:
    """Greedy outputs of the last of ``repeat`` rounds, and the engine, which has been shut down. ``flat`` are arguments
    by the names that vLLM has for them."""
    plugins = {
        "cache": {"use": "paged", "block_size": 8} | cache,
        "scheduler": {"use": "continuous", "max_num_batched_tokens": budget, "max_num_seqs": 4},
    }
    settings = {"model": model, "dtype": "float32", "device": "cpu", "max_model_len": 64, "plugins": plugins}
    engine = Engine(settings | dict(flat or {}), [FakeTokenizer()])
    done: dict[int, list[int]] = {}
    try:
        for _ in range(repeat):
            for i, prompt in enumerate(PROMPTS):
                params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
                engine.add_request(str(i), prompt, params)
            while engine.has_work:
                for end in engine.step().finished:
                    assert end.message is None, end.message
                    done[int(end.request.request_id)] = list(end.request.output_ids)
        engine.check_integrity()
    finally:
        engine.shutdown()
    return [done[i] for i in range(len(PROMPTS))], engine


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_greedy_tokens_do_not_depend_on_what_is_found_in_the_cache(model: str, dtype: str) -> None:
    plain, engine = tokens(model, dtype=dtype, prefix_caching=False)
    assert engine.parts.cache.stats().prefix_hits == 0
    for budget, repeat in ((64, 1), (64, 2), (7, 2)):
        shared, engine = tokens(model, budget=budget, repeat=repeat, dtype=dtype)
        assert engine.parts.cache.stats().prefix_hits > 0
        assert shared == plain


def test_a_narrow_cache_takes_a_quarter_of_the_memory_and_changes_tokens(model: str) -> None:
    wide, narrow = (tokens(model, flat={"kv_cache_dtype": dtype}, num_blocks=64) for dtype in ("auto", "fp8"))
    sizes = [engine.parts.layout.num_bytes for _, engine in (wide, narrow)]
    assert sizes[0] == 4 * sizes[1]
    assert {spec.dtype for spec in narrow[1].parts.layout.specs} == {"fp8_e4m3"}
    # Random weights: roundings of an eighth show in some token, so what is stored is what is read.
    assert wide[0] != narrow[0]


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_qwen_still_knows_the_capital_of_france(qwen_model: Path, dtype: str) -> None:
    with LLM(str(qwen_model), dtype="float32", max_model_len=256, kv_cache_dtype=dtype) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        cold, warm = (llm.generate("The capital of France is", params, use_tqdm=False)[0] for _ in range(2))
    assert "Paris" in cold.outputs[0].text
    assert warm.outputs[0].text == cold.outputs[0].text
