"""Scales of keys and values that a checkpoint brings for a cache of 8-bit floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native_kit import make_model, make_native, save
from safetensors.torch import load_file, save_file

from trivet.engine import Engine
from trivet.errors import ModelLoadError
from trivet.testing.fakes import FakeTokenizer
from trivet_native.suits import RANK, suits
from trivet_schemas.config import EngineConfig
from trivet_schemas.sampling import SamplingParams

PROMPTS = [[3 + (7 * i) % 70 for i in range(29)], [5, 9, 40, 11, 60, 33, 2, 71, 18, 25]]
#: a power of two: what is divided by it and multiplied again is the same number, but for the limits of the type
FACTOR = 4096.0


def stretched(folder: Path, factors: torch.Tensor) -> str:
    """A model that computes what the plain one computes with keys and values that are ``factors`` ``[2]`` (of the key
    heads) times as large, which 8-bit floats cannot hold."""
    model = make_model("llama")
    keys = factors.repeat_interleave(8)
    heads = keys.view(2, 1, 8).expand(2, 2, 8).flatten()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.weight.mul_(keys[:, None])
            attention.q_proj.weight.div_(heads[:, None])
            attention.v_proj.weight.mul_(keys[:, None])
            attention.o_proj.weight.div_(heads)
    return save(model, folder)


def with_tensors(name: str, tensors: dict[str, torch.Tensor]) -> str:
    """The model with more tensors beside each layer's attention."""
    path = Path(name) / "model.safetensors"
    weights = load_file(path)
    for layer in range(3):
        weights |= {f"model.layers.{layer}.self_attn.{key}": value.clone() for key, value in tensors.items()}
    save_file(weights, path, metadata={"format": "pt"})
    return name


def tokens(name: str, kv_cache_dtype: str = "fp8") -> list[list[int]]:
    settings: dict[str, Any] = {
        "model": name,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 64,
        "kv_cache_dtype": kv_cache_dtype,
        "plugins": {"model": "native", "cache": {"use": "paged", "block_size": 4, "num_blocks": 64}},
    }
    engine = Engine(settings, [FakeTokenizer()])
    done: dict[int, list[int]] = {}
    try:
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        while engine.has_work:
            for end in engine.step().finished:
                assert end.message is None, end.message
                done[int(end.request.request_id)] = list(end.request.output_ids)
    finally:
        engine.shutdown()
    return [done[i] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of keys and values that need no scale."""
    return tokens(save(make_model("llama"), tmp_path_factory.mktemp("plain")))


def test_without_scales_large_keys_and_values_are_cut_off(plain: list[list[int]], tmp_path: Path) -> None:
    name = stretched(tmp_path, torch.full((2,), FACTOR))
    assert tokens(name) != plain
    assert tokens(with_tensors(name, {"k_scale": torch.tensor(-1.0), "v_scale": torch.tensor(-1.0)})) != plain


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_cache.scale", "v_cache.scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("kv_scale",),
        ("k_scale",),
    ],
)
def test_scales_are_found_under_every_name(plain: list[list[int]], tmp_path: Path, names: tuple[str, ...]) -> None:
    name = stretched(tmp_path, torch.full((2,), FACTOR))
    assert tokens(with_tensors(name, {key: torch.tensor([FACTOR]) for key in names})) == plain


def test_each_head_may_have_its_own(plain: list[list[int]], tmp_path: Path) -> None:
    factors = torch.tensor([FACTOR, 2.0**20])
    name = stretched(tmp_path, factors)
    assert tokens(with_tensors(name, {"k_scale": factors, "v_scale": factors})) == plain


def test_a_cache_as_wide_as_the_model_needs_none(tmp_path: Path) -> None:
    name = stretched(tmp_path / "a", torch.full((2,), FACTOR))
    expected = tokens(name, "auto")
    # Divided by this, keys and values would vanish.
    assert tokens(with_tensors(name, {"kv_scale": torch.tensor(1e38)}), "auto") == expected


def test_scales_of_another_model_are_refused(tmp_path: Path) -> None:
    name = with_tensors(save(make_model("llama"), tmp_path), {"k_scale": torch.ones(3)})
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.k_scale' has 3 scales for 2 key heads"):
        make_native(name).load()


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}, "config_groups": {}}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}, False),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, False),
        ({"quant_method": "modelopt"}, False),
    ],
)
def test_a_checkpoint_that_is_calibrated_for_the_cache_alone_is_served(
    tmp_path: Path, plain: list[list[int]], given: dict[str, Any], served: bool
) -> None:
    name = stretched(tmp_path, torch.full((2,), FACTOR))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": given}))
    assert (suits(EngineConfig(model=name)).rank == RANK) is served
    if served:
        assert tokens(with_tensors(name, {"kv_scale": torch.tensor(FACTOR)})) == plain
