"""``trivet config``: check and schema."""

from __future__ import annotations

import json
import struct
from typing import Any

import jsonschema
import pytest
from launcher_kit import Run, Site, memory_plan, model_config, model_folder

from trivet.engine import Engine
from trivet.errors import ModelLoadError


def test_a_check_shows_what_the_file_comes_to(site: Site, run: Run) -> None:
    config = site.config(max_model_len=256)
    result = run("config", "check", config, "--set", "plugins.cache.block_size=8")
    assert result.code == 0
    assert "no problems found" in result.out
    (cache,) = (line for line in result.out.splitlines() if line.split()[:1] == ["cache"])
    assert "paged" in cache
    assert "block_size: 8" in cache
    (scheduler,) = (line for line in result.out.splitlines() if line.split()[:1] == ["scheduler"])
    assert "auto: " in scheduler
    assert "max_num_batched_tokens: 2048" in scheduler


@pytest.mark.parametrize("changes", [{"kv_lora_rank": 8}, {"layer_types": ["linear_attention", "full_attention"]}])
def test_an_architecture_with_another_cache_is_not_guessed(site: Site, run: Run, changes: dict[str, Any]) -> None:
    plan = memory_plan(run, model_config(site, model_folder(site, **changes)))
    assert plan["kv_bytes_per_token"] is None
    assert plan["weights_on_disk"] is not None


def test_a_truncated_file_is_named(site: Site, run: Run) -> None:
    model = model_folder(site)
    weights = model / "model.safetensors"
    for size in (weights.stat().st_size - 1, 20, 4):
        weights.write_bytes(weights.read_bytes()[:size])
        result = run("config", "check", model_config(site, model))
        assert result.code == 2
        assert str(weights) in result.err
        assert "truncated" in result.err


def test_a_missing_shard_is_named(site: Site, run: Run) -> None:
    model = model_folder(site)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    result = run("config", "check", model_config(site, model))
    assert result.code == 2
    assert "model-2.safetensors" in result.err


def test_a_truncated_gguf_file_is_named(site: Site, run: Run) -> None:
    path = site.folder / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQ", 3, 100))
    result = run("config", "check", model_config(site, path))
    assert result.code == 2
    assert str(path) in result.err


def test_a_hub_model_is_not_downloaded(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    config = site.folder / "config.yaml"
    config.write_text("model: some-owner/some-model-that-nobody-has\n", encoding="utf-8")
    assert any("hub" in note for note in memory_plan(run, config)["notes"])


def test_the_schema_accepts_what_can_be_loaded_and_refuses_the_rest(site: Site, run: Run) -> None:
    site.plugin(
        "watcher",
        """
        from trivet_schemas.options import Options

        class trivet_options(Options):
            key: int = 1

        @hookimpl(wrapper=True)
        def trivet_schedule(inputs):
            return (yield)
        """,
    )
    result = run("config", "schema")
    assert (result.code, result.err) == (0, "")
    validator = jsonschema.Draft202012Validator(json.loads(result.out))
    good = {
        "model": "demo",
        "max_num_seqs": 8,
        "plugins": {
            "model": {"use": "fake", "vocab_size": 9},
            "scheduler": "static",
            "extension": [{"use": "watcher", "key": 2}, "watcher"],
        },
    }
    assert list(validator.iter_errors(good)) == []
    for bad in (
        {"modle": "demo"},
        {"model": "demo", "plugins": {"cache": {"use": "paged", "blok_size": 4}}},
        {"model": "demo", "plugins": {"extension": [{"use": "watcher", "key": "x"}]}},
        {"model": "demo", "plugins": {"scheduler": "no such"}},
    ):
        assert list(validator.iter_errors(bad)), bad


def test_the_schema_leaves_out_what_is_broken_and_says_so(site: Site, run: Run) -> None:
    site.plugin("failing", "import no_such_module_at_all")
    result = run("config", "schema")
    assert result.code == 0
    assert json.loads(result.out)["type"] == "object"
    assert "no_such_module_at_all" in result.err


@pytest.mark.parametrize(
    ("changes", "plugins", "reason"),
    [
        (
            {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]},
            {},
            "auto had to pass over native: its model_type 'gpt_neox' is not one of llama",
        ),
        ({}, {"model": "transformers"}, "set plugins.model to native if it serves this model"),
        ({}, {"model": {"use": "native", "compile": True}}, "compile and plugins.quantization exclude each other"),
    ],
)
def test_what_a_start_refuses_to_quantise_a_check_refuses_with_the_same_words(
    site: Site, run: Run, changes: dict[str, Any], plugins: dict[str, Any], reason: str
) -> None:
    config = model_config(
        site, model_folder(site, **changes), quantization="int8", plugins={"tokenizer": "fake", **plugins}
    )
    with pytest.raises(ModelLoadError, match=reason) as refused:
        Engine(str(config))
    result = run("config", "check", config)
    assert result.code == 2
    assert result.err.splitlines()[-1] == f"error: {refused.value}"
    assert run("config", "check", config, "--set", "quantization=null").code == 0
