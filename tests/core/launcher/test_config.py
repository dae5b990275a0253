"""``trivet config``: check and schema."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from launcher_kit import Run, Site

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def _safetensors(path: Path, num_elements: int = 1000) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [num_elements], "data_offsets": [0, 2 * num_elements]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(2 * num_elements))


def _model(site: Site, **changes: Any) -> Path:
    folder = site.folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_LLAMA, **changes}), encoding="utf-8")
    _safetensors(folder / "model.safetensors")
    return folder


def _config(site: Site, model: Path, **values: Any) -> Path:
    path = site.folder / "config.yaml"
    path.write_text(yaml.safe_dump({"model": str(model), **values}), encoding="utf-8")
    return path


def _plan(run: Run, config: Path, *arguments: str) -> dict[str, Any]:
    result = run("config", "check", config, "--json", *arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)["memory"]


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


def test_the_memory_plan_of_a_folder(site: Site, run: Run) -> None:
    config = _config(site, _model(site), plugins={"cache": {"use": "paged", "memory": "1MiB"}})
    plan = _plan(run, config)
    per_token = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, head size, bytes
    blocks = (1 << 20) // (per_token * 16) - 1
    assert plan["kv_bytes_per_token"] == per_token
    assert plan["weights_on_disk"] > 2000
    assert (plan["dtype"], plan["weights_in_memory"]) == ("bfloat16", 2000)
    assert (plan["max_model_len"], plan["num_blocks"], plan["num_tokens"]) == (256, blocks, blocks * 16)
    assert plan["num_full_requests"] == blocks * 16 // 256
    assert _plan(run, config, "--set", "dtype=float32")["kv_bytes_per_token"] == 2 * per_token
    text = run("config", "check", config).out
    assert f"{blocks * 16} tokens, {blocks * 16 // 256} requests of the full length" in text


def test_without_a_size_the_cache_takes_what_is_left(site: Site, run: Run) -> None:
    plan = _plan(run, _config(site, _model(site)))
    assert plan["num_blocks"] is None
    assert any("plugins.cache.memory" in note for note in plan["notes"])


@pytest.mark.parametrize("changes", [{"kv_lora_rank": 8}, {"layer_types": ["linear_attention", "full_attention"]}])
def test_an_architecture_with_another_cache_is_not_guessed(site: Site, run: Run, changes: dict[str, Any]) -> None:
    plan = _plan(run, _config(site, _model(site, **changes)))
    assert plan["kv_bytes_per_token"] is None
    assert plan["weights_on_disk"] is not None


def test_memory_that_is_too_small_says_what_would_help(site: Site, run: Run) -> None:
    config = _config(site, _model(site), max_model_len=256, plugins={"cache": {"use": "paged", "memory": "32KiB"}})
    result = run("config", "check", config)
    assert result.code == 2
    assert "max_model_len" in result.err
    assert "plugins.cache.memory" in result.err


def test_a_truncated_file_is_named(site: Site, run: Run) -> None:
    model = _model(site)
    weights = model / "model.safetensors"
    for size in (weights.stat().st_size - 1, 20, 4):
        weights.write_bytes(weights.read_bytes()[:size])
        result = run("config", "check", _config(site, model))
        assert result.code == 2
        assert str(weights) in result.err
        assert "truncated" in result.err


def test_a_missing_shard_is_named(site: Site, run: Run) -> None:
    model = _model(site)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    result = run("config", "check", _config(site, model))
    assert result.code == 2
    assert "model-2.safetensors" in result.err


def test_a_truncated_gguf_file_is_named(site: Site, run: Run) -> None:
    path = site.folder / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQ", 3, 100))
    result = run("config", "check", _config(site, path))
    assert result.code == 2
    assert str(path) in result.err


def test_a_hub_model_is_not_downloaded(site: Site, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    config = site.folder / "config.yaml"
    config.write_text("model: some-owner/some-model-that-nobody-has\n", encoding="utf-8")
    assert any("hub" in note for note in _plan(run, config)["notes"])


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
