"""Weights read from their files by the checkpoint's names: the same numbers from a folder and from a GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from test_gguf_models import MODELS, make_model, write_gguf

from trivet.errors import ModelLoadError
from trivet_torch.weights import load_causal_lm
from trivet_torch.weights.stored import StoredWeights, open_weights


def save(tmp_path: Path, name: str, **options: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with the random model ``name``, and what its files hold."""
    folder = tmp_path / "hf"
    make_model(name).save_pretrained(folder, **options)
    return folder, {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


def check_tensors(weights: StoredWeights, expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert set(weights.names) == set(expected)
    for name, value in expected.items():
        weights.expect(name, value.shape)
        found = weights.tensor(name, dtype)
        assert found.dtype == dtype
        assert torch.equal(found, value.to(dtype)), name
        if value.ndim == 2:
            ids = torch.tensor([len(value) - 1, 0, len(value) // 2, 0])
            assert torch.equal(weights.rows(name, ids, dtype), value[ids].to(dtype)), name
            rows = weights.matrix(name, dtype)
            assert rows.shape == tuple(value.shape)
            half = len(value) // 2
            assert torch.equal(torch.cat([rows.rows(0, half), rows.rows(half, len(value))]), value.to(dtype)), name
        weights.release(name)
        assert torch.equal(weights.tensor(name, dtype), value.to(dtype)), name


@pytest.mark.parametrize("name", sorted(MODELS))
def test_folder_and_gguf_file_hold_the_checkpoints_tensors(name: str, tmp_path: Path) -> None:
    folder, expected = save(tmp_path, name)
    path = write_gguf(tmp_path / "model.gguf", make_model(name), MODELS[name][0])
    for location in (folder, path):
        weights = open_weights(location)
        check_tensors(weights, expected, torch.float32)
        assert weights.eos_token_ids == (2,)
        assert weights.config.hidden_size == 64
        assert weights.unused() == []
        weights.close()


def test_values_are_rounded_to_the_wanted_dtype(tmp_path: Path) -> None:
    folder, expected = save(tmp_path, "qwen2")
    path = write_gguf(tmp_path / "model.gguf", make_model("qwen2"), "qwen2", dtype=np.float16)
    for location in (folder, path):
        check_tensors(open_weights(location), expected, torch.bfloat16)


def test_only_the_files_of_the_index_are_read(tmp_path: Path) -> None:
    folder, expected = save(tmp_path, "llama", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    other = {key: value.contiguous() for key, value in make_model("llama", seed=1).state_dict().items()}
    save_file(other, folder / "model.safetensors")
    check_tensors(open_weights(folder), expected, torch.float32)


def test_a_tensor_in_its_own_dtype_is_no_copy(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, "llama")
    weights = open_weights(folder)
    first, second = (weights.tensor("lm_head.weight", torch.float32) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


def test_a_view_outlives_the_weights(tmp_path: Path) -> None:
    folder, expected = save(tmp_path, "llama")
    weights = open_weights(folder)
    view = weights.tensor("model.norm.weight", torch.float32)
    weights.close()
    del weights
    shutil.rmtree(folder)
    assert torch.equal(view, expected["model.norm.weight"])


def write_raw(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file without the padding that writers usually put after the header."""
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # an odd length: nothing is aligned
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def test_unaligned_and_empty_tensors(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, "llama")
    values = np.arange(6, dtype=np.float32)
    write_raw(
        folder / "model.safetensors",
        {
            "a": ("U8", [1], b"\x07"),
            "empty": ("BF16", [0, 4], b""),
            "b": ("F32", [2, 3], values.tobytes()),
            "c": ("BF16", [3], torch.tensor([1.5, -2.0, 3.0]).bfloat16().view(torch.int16).numpy().tobytes()),
            "scalar": ("I64", [], (5).to_bytes(8, "little")),
        },
    )
    weights = open_weights(folder)
    assert weights.tensor("a", torch.uint8).tolist() == [7]
    assert weights.tensor("empty", torch.float32).shape == (0, 4)
    assert weights.tensor("b", torch.float32).tolist() == values.reshape(2, 3).tolist()
    assert weights.rows("b", torch.tensor([1]), torch.float32).tolist() == [[3.0, 4.0, 5.0]]
    assert weights.tensor("c", torch.float32).tolist() == [1.5, -2.0, 3.0]
    assert weights.tensor("scalar", torch.int64).item() == 5
    assert weights.stored("c") == "bfloat16"
    for name in weights.names:
        weights.release(name)


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "qwen3moe"])
def test_experts_that_a_folder_stacks_are_single_matrices(name: str, tmp_path: Path) -> None:
    folder, expected = save(tmp_path, name)
    stacked = {key: value.contiguous() for key, value in make_model(name).state_dict().items()}
    if name == "mixtral":
        stacked = {key.replace("mlp.gate.", "block_sparse_moe.gate."): value for key, value in stacked.items()}
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"].ndim == 3
    save_file(stacked, folder / "model.safetensors")
    check_tensors(open_weights(folder), expected, torch.float32)


def gpt_oss(folder: Path) -> dict[str, torch.Tensor]:
    """Save a random GPT-OSS model in ``folder``; returns its parameters, experts as single matrices."""
    config = transformers.GptOssConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder)
    expected = {}
    for name, value in model.state_dict().items():
        path, _, kind = name.rpartition(".experts.")
        if not path:
            expected[name] = value
        elif kind.endswith("_bias"):
            expected |= {f"{path}.experts.{i}.{kind.removesuffix('_bias')}.bias": v for i, v in enumerate(value)}
        else:
            expected |= {f"{path}.experts.{i}.{kind}.weight": v.t() for i, v in enumerate(value)}
    return expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_of_gpt_oss_are_single_matrices(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = gpt_oss(tmp_path)
    assert expected["model.layers.1.mlp.experts.2.gate_up_proj.weight"].shape == (24, 16)
    check_tensors(open_weights(tmp_path), expected, dtype)


def test_linear_of_a_transposed_matrix_is_dense(tmp_path: Path) -> None:
    expected = gpt_oss(tmp_path)
    weights = open_weights(tmp_path)
    name = "model.layers.0.mlp.experts.1.down_proj"
    tensors = weights.linear(name).tensors
    assert tensors.keys() == {"weight", "bias"}
    assert tensors["weight"].is_contiguous()
    assert torch.equal(tensors["weight"], expected[f"{name}.weight"])
    assert torch.equal(tensors["bias"], expected[f"{name}.bias"].float())
    assert weights.matrix(f"{name}.weight", torch.bfloat16).rows(3, 9).is_contiguous()


# --- linear layers as stored -----------------------------------------------------------------------------------------


def test_linear_of_a_folder_holds_weight_bias_and_what_lies_beside_them(tmp_path: Path) -> None:
    folder, expected = save(tmp_path, "qwen2")
    name = "model.layers.1.self_attn.k_proj"
    expected = {key: value.bfloat16() for key, value in expected.items()} | {f"{name}.scale": torch.ones(3)}
    save_file(expected, folder / "model.safetensors")
    linear = open_weights(folder).linear(name)
    assert (linear.name, linear.shape, linear.stored) == (name, (32, 64), "bfloat16")
    assert linear.tensors.keys() == {"weight", "bias", "scale"}
    assert torch.equal(linear.tensors["weight"], expected[f"{name}.weight"])
    assert torch.equal(linear.tensors["bias"], expected[f"{name}.bias"].float())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_raw_blocks_have_the_checkpoints_rows(kind: str, tmp_path: Path) -> None:
    ggml_type = GGMLQuantizationType[kind]

    def quantise(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight"))]:
            writer.add_tensor(name, quants.quantize(tensors.pop(name), ggml_type), raw_dtype=ggml_type)

    model = make_model("llama-biases")
    weights = open_weights(write_gguf(tmp_path / "model.gguf", model, "llama", change=quantise))
    for part in "qkv":
        name = f"model.layers.0.self_attn.{part}_proj"
        linear = weights.linear(name)
        expected = quants.dequantize(
            quants.quantize(model.state_dict()[f"{name}.weight"].numpy(), ggml_type), ggml_type
        )
        assert linear.stored == kind == weights.stored(f"{name}.weight")
        assert linear.shape == expected.shape
        assert linear.tensors["weight"].dtype == np.uint8
        np.testing.assert_array_equal(quants.dequantize(linear.tensors["weight"], ggml_type), expected)
        np.testing.assert_array_equal(weights.tensor(f"{name}.weight", torch.float32).numpy(), expected)
        assert torch.equal(linear.tensors["bias"], model.state_dict()[f"{name}.bias"])


def test_linear_of_a_gguf_file_in_float16_is_a_tensor(tmp_path: Path) -> None:
    model = make_model("llama")
    weights = open_weights(write_gguf(tmp_path / "model.gguf", model, "llama", dtype=np.float16))
    linear = weights.linear("model.layers.0.self_attn.q_proj")
    assert linear.stored == "float16"
    assert torch.equal(linear.tensors["weight"], model.state_dict()[f"{linear.name}.weight"].half())
    assert "bias" not in linear.tensors


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "gguf"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "folder":
        return save(tmp_path, "llama")[0]
    return write_gguf(tmp_path / "model.gguf", make_model("llama"), "llama")


def test_a_missing_tensor_is_named_with_those_beside_it(location: Path) -> None:
    weights = open_weights(location)
    name = "model.layers.0.self_attn.q_proj.bias"
    calls: list[Callable[[], Any]] = [
        lambda: weights.tensor(name, torch.float32),
        lambda: weights.shape(name),
        lambda: weights.stored(name),
        lambda: weights.expect(name, (64,)),
        lambda: weights.matrix(name, torch.float32),
        lambda: weights.linear("model.layers.9.self_attn.q_proj"),
    ]
    for call in calls:
        with pytest.raises(ModelLoadError, match=r"hold no tensor 'model\.layers\.\d\.self_attn\.q_proj") as caught:
            call()
        assert str(location) in str(caught.value)
    with pytest.raises(ModelLoadError, match=r"beside it there are 'model\.layers\.0\.self_attn\.q_proj\.weight'"):
        weights.shape(name)


def test_another_shape_names_both(location: Path) -> None:
    weights = open_weights(location)
    with pytest.raises(ModelLoadError, match=r"'lm_head\.weight' has the shape \[96, 64\] instead of \[96, 32\]"):
        weights.expect("lm_head.weight", (96, 32))
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' has the shape \[64\], but a linear"):
        weights.linear("model.norm")


def test_tensors_that_nobody_asked_for(location: Path) -> None:
    weights = open_weights(location)
    rest = set(weights.names) - {"lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"}
    weights.linear("lm_head")
    weights.tensor("model.norm.weight", torch.float32)
    weights.rows("model.embed_tokens.weight", torch.tensor([1]), torch.float32)
    assert weights.unused() == sorted(rest)


def test_truncated_files(location: Path) -> None:
    file = location / "model.safetensors" if location.is_dir() else location
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ModelLoadError, match="truncated"):
        open_weights(location)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, r"'x' has 8 bytes, which do not fit its shape \[3\]"),
        ({"dtype": "F32", "shape": None, "data_offsets": [0, 8]}, "entry of tensor 'x' is damaged"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, r"'x' of the shape \[2\] at bytes -8 to 0"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-9999, -9991]}, "which cannot be"),
        ({"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}, "which cannot be"),
    ],
)
def test_damaged_header(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = save(tmp_path, "llama")
    text = json.dumps({"x": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelLoadError, match=message):
        open_weights(folder)


def test_a_stored_type_that_torch_lacks(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, "llama")
    write_raw(folder / "model.safetensors", {"x": ("F4", [4, 2], bytes(4))})
    with pytest.raises(ModelLoadError, match="'x' is stored as F4, which is not supported"):
        open_weights(folder).tensor("x", torch.float32)


def test_gguf_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    def change(_: Any, tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.attn_sinks.weight"] = np.zeros((4, 4))

    path = write_gguf(tmp_path / "model.gguf", make_model("llama"), "llama", change=change)
    with pytest.raises(ModelLoadError, match=r"no parameter of a 'llama' model corresponds to 'blk\.1\.attn_sinks"):
        open_weights(path)


# --- real models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["gemma270/model.gguf", "gemma270/hf", "qwen05/model.gguf", "qwen05/hf"])
def test_real_weights_equal_the_parameters_of_transformers(file: str, real_model: Callable[[str], Path]) -> None:
    model, info = load_causal_lm(real_model(file), dtype=torch.float32, attn_implementation="eager")
    weights = open_weights(real_model(file))
    parameters = dict(model.named_parameters())
    assert set(weights.names) == set(parameters)
    assert list(weights.eos_token_ids) == info.eos_token_ids
    for name, value in parameters.items():
        assert torch.equal(weights.tensor(name, torch.float32), value), name
        weights.release(name)
