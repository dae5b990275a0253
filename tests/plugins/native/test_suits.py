"""``use: auto`` takes the native model where everything in the configuration is understood, and says why elsewhere."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from native_kit import CASES, make_model, make_native, save

from trivet.engine import Engine
from trivet.errors import ModelLoadError
from trivet.testing.fakes import FakeTokenizer
from trivet_native.suits import RANK, suits
from trivet_schemas.config import EngineConfig

# Field, value and what the reason says, on top of a plain Llama's configuration.
DECLINED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, "model_type 'mamba' is not one of llama"),
    ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not implemented"),
    ({"rope_parameters": {"rope_type": "ntk_by_parts", "rope_theta": 1.0}}, "rope_type 'ntk_by_parts'"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type 'su'"),
    ({"layer_types": ["linear_attention"]}, "layer_types"),
    ({"attention_multiplier": 0.5}, "field attention_multiplier (0.5) is not known"),
]
PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": True}


def _written(folder: Path, changes: dict[str, Any]) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(PLAIN | changes))
    return EngineConfig(model=str(folder))


def test_a_plain_configuration_is_served(tmp_path: Path) -> None:
    harmless = {"bos_token_id": 1, "_name_or_path": "x", "transformers_version": "4.0", "attention_dropout": 0.1}
    assert suits(_written(tmp_path, harmless)).rank == RANK


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen2_moe"])
def test_heads_for_scores_of_sequences_are_served(tmp_path: Path, case: str) -> None:
    import transformers
    from native_kit import _COMMON

    name, own = CASES[case]
    config = getattr(transformers, name)(**(_COMMON | own), num_labels=3)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    assert suits(EngineConfig(model=str(tmp_path))).rank == RANK


@pytest.mark.parametrize(("changes", "reason"), DECLINED)
def test_what_is_not_understood_is_declined_by_name(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    answer = suits(_written(tmp_path, changes))
    assert answer.rank is None
    assert reason in answer.reason


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_served_as_transformers_writes_it(tmp_path: Path, case: str) -> None:
    import transformers
    from native_kit import _COMMON

    name, own = CASES[case]
    getattr(transformers, name)(**(_COMMON | own)).save_pretrained(tmp_path)
    assert suits(EngineConfig(model=str(tmp_path))).rank == RANK


def test_code_that_a_model_brings_is_not_replaced(tmp_path: Path) -> None:
    config = _written(tmp_path, {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}})
    assert suits(config).rank == RANK
    trusting = config.model_copy(update={"trust_remote_code": True})
    assert "auto_map" in suits(trusting).reason


def test_the_configuration_of_a_hub_model_decides_before_it_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import trivet_native.suits

    asked = []

    def hub_config(name: str, revision: str | None) -> dict[str, Any] | None:
        asked.append((name, revision))
        return None if revision == "gone" else PLAIN | ({"hidden_act": "relu2"} if revision == "other" else {})

    monkeypatch.setattr(trivet_native.suits, "hub_config", hub_config)
    name = "somebody/a-model-that-is-not-here"
    assert suits(EngineConfig(model=name)).rank == RANK
    assert "hidden_act 'relu2'" in suits(EngineConfig(model=name, revision="other")).reason
    assert "not known before" in suits(EngineConfig(model=name, revision="gone")).reason
    assert asked == [(name, None), (name, "other"), (name, "gone")]


def test_offline_a_hub_model_that_is_not_here_is_left_to_others() -> None:
    answer = suits(EngineConfig(model="somebody/a-model-that-is-not-here"))
    assert answer.rank is None
    assert "not known before" in answer.reason


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_configuration_is_declined(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert suits(EngineConfig(model=str(tmp_path))).rank is None


def test_gguf_files_are_told_by_their_architecture(demo_model: Path) -> None:
    assert suits(EngineConfig(model=str(demo_model))).rank == RANK


def test_the_answer_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    _written(tmp_path, {})
    program = (
        "import sys; from trivet_native.suits import suits; from trivet_schemas.config import EngineConfig; "
        "print(suits(EngineConfig(model=sys.argv[1])).rank, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(RANK), "False", "False"]


def _engine(name: str, **roles: Any) -> Engine:
    settings = {"model": name, "dtype": "float32", "device": "cpu", "max_model_len": 64, "plugins": roles}
    return Engine(settings, [FakeTokenizer()])


def test_auto_takes_it_and_its_absence_is_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    engine = _engine(save(make_model("llama"), tmp_path / "llama"))
    assert engine.parts.registry.selection("model").choices[0].offer.name == "native"
    engine.shutdown()
    assert not caplog.records
    config = transformers.GPTNeoXConfig(
        vocab_size=FakeTokenizer().size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    other = save(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "neox")
    with caplog.at_level(logging.WARNING, "trivet.model"):
        engine = _engine(other)
    engine.shutdown()
    text = caplog.text
    assert "the transformers library computes GPTNeoXForCausalLM; not native: its model_type 'gpt_neox'" in text


def test_loading_refuses_what_suits_would_decline(tmp_path: Path) -> None:
    name = save(make_model("llama"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "relu"}))
    with pytest.raises(ModelLoadError, match="hidden_act 'relu' is not implemented; set plugins.model to transformers"):
        make_native(name).load()


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    name = save(make_model("llama"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 52}))
    with pytest.raises(ModelLoadError, match=r"mlp.gate_proj.weight.*\[48, 32\] instead of \[52, 32\]"):
        make_native(name).load()
    path.write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(ModelLoadError, match="q_proj.bias"):
        make_native(name).load()
    path.write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ModelLoadError, match="model.layers.3"):
        make_native(name).load()


def test_tensors_without_a_use_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = save(make_model("llama"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    make_native(name).load()
    assert "the model has no use for the tensors model.layers.2.input_layernorm.weight" in caplog.text
