"""What a model's files recommend, and where it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_kit import config

from trivet import LLM, AsyncEngine, EngineConfig, ModelLoadError, SamplingParams
from trivet.model_defaults import default_sampling_values, pooling_defaults
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens

RECOMMENDED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": None,
    "repetition_penalty": 1.05,
    "max_new_tokens": 77,
    "eos_token_id": [1, 2],
}


def write(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a configuration and a recommendation."""
    write(tmp_path, "config.json", {})
    write(tmp_path, "generation_config.json", RECOMMENDED)
    return tmp_path


def test_the_models_recommendation_counts_under_the_names_of_sampling_parameters(model: Path) -> None:
    values = default_sampling_values(EngineConfig(model=str(model)))
    assert values == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 77,
    }


def test_a_recommendation_can_be_left_out_or_taken_from_elsewhere(model: Path, tmp_path: Path) -> None:
    assert default_sampling_values(EngineConfig(model=str(model), generation_config="vllm")) == {}
    other = write(tmp_path / "other", "generation_config.json", {"top_k": 3}).parent
    assert default_sampling_values(EngineConfig(model=str(model), generation_config=str(other))) == {"top_k": 3}
    with pytest.raises(ModelLoadError, match="generation_config: .*nowhere.*does not exist; name a folder"):
        default_sampling_values(EngineConfig(model=str(model), generation_config=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("source", ["a" * 5000, "a/" * 3000])
def test_a_folder_that_no_file_system_can_have_does_not_exist(model: Path, source: str) -> None:
    with pytest.raises(ModelLoadError, match=r"(?s)generation_config: a.*does not exist; name a folder"):
        default_sampling_values(EngineConfig(model=str(model), generation_config=source))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_file_that_nests_too_deep_is_named(model: Path, opening: str) -> None:
    write(model, "generation_config.json", opening * 100_000)
    with pytest.raises(
        ModelLoadError, match=r"generation_config\.json: cannot be read as JSON .*: download the file again"
    ):
        default_sampling_values(EngineConfig(model=str(model)))


def test_a_model_without_a_recommendation_has_none(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {})
    assert default_sampling_values(EngineConfig(model=str(tmp_path))) == {}
    assert default_sampling_values(EngineConfig(model="somebody/nothing-of-the-kind")) == {}
    assert default_sampling_values(EngineConfig(model=str(tmp_path / "missing.gguf"))) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -1}, "temperature: must be at least 0"),
        ({"top_k": "all"}, "top_k"),
        ("{", "cannot be read as JSON"),
        ([1], "must hold a JSON object, got list"),
    ],
)
def test_a_recommendation_that_cannot_be_is_named(model: Path, content: Any, message: str) -> None:
    write(model, "generation_config.json", content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        default_sampling_values(EngineConfig(model=str(model)))
    assert "generation_config.json" in str(caught.value)


def _settings(folder: Path) -> dict[str, Any]:
    write(folder, "config.json", {})
    write(folder, "generation_config.json", {"temperature": 0.0, "max_new_tokens": 5})
    return config() | {"model": str(folder)}


def test_calls_without_parameters_follow_the_recommendation(tmp_path: Path) -> None:
    with LLM.from_config(_settings(tmp_path), [fakes]) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.max_tokens) == (0.0, 5)
        defaults.max_tokens = 9
        (output,) = llm.generate([[5, 6]], use_tqdm=False)
        assert output.outputs[0].token_ids == reference_tokens([5, 6], 5), "a caller's copy changed the defaults"
        (output,) = llm.generate([[5, 6]], SamplingParams(temperature=0), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 16, "parameters of the caller stand for themselves"


@pytest.mark.asyncio
async def test_streams_without_parameters_follow_the_recommendation(tmp_path: Path) -> None:
    async with AsyncEngine(_settings(tmp_path), [fakes]) as engine:
        assert engine.get_default_sampling_params().max_tokens == 5
        last = [output async for output in engine.generate([5, 6])][-1]
        assert last.outputs[0].token_ids == reference_tokens([5, 6], 5)


_MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
_NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("pooling_mode_mean_tokens", "mean"), ("pooling_mode_cls_token", "cls"), ("pooling_mode_lasttoken", "last")],
)
@pytest.mark.parametrize("normalizes", [True, False])
def test_embeddings_are_made_as_the_models_modules_say(tmp_path: Path, mode: str, kind: str, normalizes: bool) -> None:
    write(tmp_path, "modules.json", [*_MODULES, *([_NORMALIZE] if normalizes else [])])
    write(
        tmp_path, "1_Pooling/config.json", {"word_embedding_dimension": 8, mode: True, "pooling_mode_max_tokens": False}
    )
    assert pooling_defaults(tmp_path) == (kind, normalizes)


def test_without_modules_the_last_token_counts_at_length_one(tmp_path: Path) -> None:
    assert pooling_defaults(tmp_path) == ("last", True)


def test_pooling_of_another_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "modules.json", _MODULES)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_max_tokens": True})
    with pytest.raises(ModelLoadError, match="pools by pooling_mode_max_tokens; embeddings are made by one of"):
        pooling_defaults(tmp_path)
