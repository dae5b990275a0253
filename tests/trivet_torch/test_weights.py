"""Models from Hugging Face folders: the right files, all of them, or an error that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trivet.errors import ModelLoadError
from trivet_torch.weights import load_causal_lm

F32 = {"dtype": torch.float32, "attn_implementation": "eager"}


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def check_equal(loaded: Any, model: Any) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_single_file_and_shards_give_the_model(folder: Path, sharded: Path) -> None:
    for path in (folder, sharded):
        loaded, info = load_causal_lm(path, **F32)
        check_equal(loaded, make_model())
        assert info.location.path == path
        assert not loaded.training
        assert not any(p.requires_grad for p in loaded.parameters())


def test_eos_ids_come_from_the_generation_config_first(folder: Path) -> None:
    assert load_causal_lm(folder, **F32)[1].eos_token_ids == [2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert load_causal_lm(folder, **F32)[1].eos_token_ids == [9, 4]


@pytest.mark.parametrize("ids", [1.5, True, "x", [[1]], {"id": 1}])
def test_eos_ids_that_are_none_are_refused(folder: Path, ids: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id must be a token id or a list"):
        load_causal_lm(folder, **F32)


def test_only_the_files_of_the_index_are_used(sharded: Path) -> None:
    other = {name: value.contiguous() for name, value in make_model(seed=1).state_dict().items()}
    save_file(other, sharded / "model.safetensors", {"format": "pt"})
    save_file(other, sharded / "consolidated.safetensors", {"format": "pt"})
    check_equal(load_causal_lm(sharded, **F32)[0], make_model())


def failing(folder: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_causal_lm(folder, **F32)


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    failing(sharded, f"names files that are missing: '{shard.name}'")


def test_shard_without_a_tensor_of_the_index(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = min(tensors)
    save_file({key: value for key, value in tensors.items() if key != name}, shard, {"format": "pt"})
    failing(sharded, f"in files that lack them: '{name}'")


@pytest.mark.parametrize("keep", [4, 100, 3000, -1])
def test_truncated_safetensors(keep: int, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    failing(folder, r"model\.safetensors: truncated safetensors: the header promises \d+ bytes, the file has \d+")


def test_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-5])
    failing(sharded, f"{shard.name}: truncated")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff" * 100, "not a safetensors file"),
        ((40).to_bytes(8, "little") + b"{" * 40, "header of this safetensors file is damaged"),
        ((40).to_bytes(8, "little") + b'{"a": {"data_offsets": "x"}}'.ljust(40), "is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a safetensors file"),
    ],
)
def test_a_file_that_is_no_safetensors(content: bytes, message: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    failing(folder, message)


def test_missing_parameter_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    failing(folder, r"no tensor for the parameters 'model\.layers\.1\.mlp\.up_proj\.weight'")


def test_parameter_of_another_shape_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    failing(folder, r"another shape than config\.json asks for: 'model\.norm\.weight \(\[3\] instead of \[64\]\)'")


def test_unused_tensor_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    load_causal_lm(folder, **F32)
    assert "no use for the tensors 'score.weight'" in caplog.text


def test_missing_folder_is_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failing(Path("./gone"), f"missing model folder: {tmp_path / 'gone'}")


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    failing(folder, "has no weights")
    (folder / "pytorch_model.bin").write_bytes(b"")
    failing(folder, r"only 'pytorch_model\.bin', which is not supported")


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    failing(folder, r"config\.json: cannot be read as JSON")
    (folder / "config.json").write_text("[]")
    failing(folder, "must hold a JSON object")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "no-such-rope"}}, "no-such-rope"),
    ],
)
def test_configuration_that_transformers_refuses(change: dict[str, Any], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    failing(folder, rf"(?s)transformers cannot .*{message}")
