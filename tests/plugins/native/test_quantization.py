"""A quantization provider gets the layers that it accepts as stored, and only those."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from native_kit import make_model, make_native, native_runner, save
from worker_kit import Context, greedy

from trivet.errors import ModelLoadError
from trivet.roles import Quantization, StoredLinear
from trivet_torch.linear import Linear, PlainLinear
from trivet_transformers.model import TransformersModel

PROMPT = [5, 9, 40, 11, 60, 33, 2]


class Recorder(Quantization):
    """Multiplies with the weights as they are, and keeps what it was given."""

    def __init__(self, *refused: str) -> None:
        self._refused = refused
        self.made: list[list[str]] = []

    def accepts(self, name: str, shape: tuple[int, ...], stored: str) -> bool:
        assert len(shape) == 2
        assert stored == "float32"
        return not any(name.endswith(end) for end in self._refused)

    def linear(self, parts: Sequence[StoredLinear]) -> Linear:
        self.made.append([part.name for part in parts])
        biases = [part.tensors["bias"] for part in parts if "bias" in part.tensors]
        assert len(biases) in {0, len(parts)}
        return PlainLinear(torch.cat([part.tensors["weight"] for part in parts]), torch.cat(biases) if biases else None)


def test_it_makes_the_fused_layers(tmp_path: Path) -> None:
    model, recorder = make_model("qwen2", num_hidden_layers=1), Recorder("o_proj")
    driver = native_runner(save(model, tmp_path), quantization=recorder)
    layer = "model.layers.0."
    assert recorder.made == [
        [f"{layer}self_attn.{name}_proj" for name in "qkv"],
        [f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"],
        [f"{layer}mlp.down_proj"],
        ["lm_head"],
    ]
    driver.add(0, PROMPT)
    for _ in range(4):
        driver.step()
    assert driver.outputs(0) == greedy(model, PROMPT, 4)


def test_a_fused_layer_is_left_alone_unless_all_parts_are_accepted(tmp_path: Path) -> None:
    recorder = Recorder("up_proj", "v_proj")
    make_native(save(make_model("llama"), tmp_path), quantization=recorder).load()
    assert {name.rpartition(".")[2] for names in recorder.made for name in names} == {"o_proj", "down_proj", "lm_head"}


def test_a_tied_head_is_offered_as_the_head(tmp_path: Path) -> None:
    recorder = Recorder()
    make_native(save(make_model("gemma3"), tmp_path), quantization=recorder).load()
    assert recorder.made[-1] == ["lm_head"]


def test_routers_are_never_quantised(tmp_path: Path) -> None:
    recorder = Recorder()
    make_native(save(make_model("qwen2_moe"), tmp_path), quantization=recorder).load()
    made = [name for names in recorder.made for name in names]
    assert any(".experts.3.down_proj" in name for name in made)
    assert not any(name.endswith(("mlp.gate", "shared_expert_gate")) for name in made)


def test_compile_and_quantization_exclude_each_other(tmp_path: Path) -> None:
    model = make_native(save(make_model("llama"), tmp_path), quantization=Recorder(), compile=True)
    with pytest.raises(ModelLoadError, match=r"plugins.model.compile and plugins.quantization exclude each other"):
        model.load()


def test_the_transformers_model_refuses_what_it_would_ignore(tmp_path: Path) -> None:
    context: Any = Context(save(make_model("llama"), tmp_path), quantization=Recorder())
    context.selected = lambda role: [("recorder", {})]
    with pytest.raises(
        ModelLoadError,
        match=r"plugins.quantization is 'recorder', and .* transformers does not .*: set plugins.model to native",
    ):
        TransformersModel(context).load()
