"""Quantised weights on an accelerator: by the Triton kernel, and by torchao in its place."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from native_kit import make_model, native_runner, save
from quantization_kit import blocks, compare_plan, context, error, floats, stored, tokens

from trivet.errors import ModelLoadError, PluginError
from trivet_quantization import torchao as adapter
from trivet_quantization.accelerator import TritonLinear
from trivet_quantization.blocks import FORMATS
from trivet_quantization.gguf import Gguf
from trivet_quantization.int4 import Int4
from trivet_quantization.int8 import Int8
from trivet_quantization.layers import JoinedLinear
from trivet_quantization.options import GgufOptions, Int4Options, Int8Options

UP, DOWN, HEAD = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a provider for an accelerator, whose weights stay on the CPU in want of the real one."""

    def made(options: Int8Options | Int4Options | GgufOptions, dtype: str = "bfloat16") -> Any:
        kind: Any = {Int8Options: Int8, Int4Options: Int4, GgufOptions: Gguf}[type(options)]
        quantization = kind(context("cuda:0", dtype), options)
        monkeypatch.setattr(quantization, "_device", "cpu")
        return quantization

    return made


# ------------------------------------------------------------------ Triton


@pytest.mark.parametrize(
    ("options", "name", "most"),
    [
        (Int8Options(), UP, 0.008),
        (Int8Options(group=32), UP, 0.007),
        (Int8Options(group=64), UP, 0.007),
        (Int8Options(group=None), UP, 0.01),
        (Int4Options(), UP, 0.085),
        (Int4Options(offsets=False), UP, 0.095),
        (Int4Options(), DOWN, 0.007),
        (Int4Options(lm_head=4), HEAD, 0.085),
        (Int4Options(), HEAD, 0.007),
    ],
)
def test_products_are_close(options: Any, name: str, most: float, make: Any) -> None:
    weight, bias = floats(96, 200), torch.linspace(-1, 1, 96)
    layer = make(options).linear([stored(weight, name, bias), stored(weight, name)])
    assert (layer.in_features, layer.out_features) == (200, 192)
    x = tokens(5, 200)
    exact = torch.cat([x @ weight.T + bias, x @ weight.T], 1)
    assert error(layer(x), exact) < most
    for dtype in (torch.bfloat16, torch.float16):
        got = layer(x.to(dtype))
        assert got.dtype == dtype
        assert error(got.float(), exact) < most + 0.005


@pytest.mark.parametrize("kind", sorted(kind.name for kind in FORMATS))
def test_blocks_are_taken_over(kind: str, make: Any) -> None:
    part, weight = blocks(kind, 40, 256)
    x = tokens(3, 256)
    # Scales of the K types are products, rounded to float16.
    most = 4e-4 if kind.endswith(("_K", "_XS")) else 1e-6
    assert error(make(GgufOptions()).linear([part])(x), x @ weight.T) < most


def test_parts_of_several_types(make: Any) -> None:
    (small, small_weight), (large, large_weight) = blocks("Q4_K", 40, 256), blocks("Q8_0", 24, 256)
    layer = make(GgufOptions()).linear([small, large])
    assert isinstance(layer, JoinedLinear)
    assert layer.capturable
    x = tokens(3, 256)
    assert error(layer(x), torch.cat([x @ small_weight.T, x @ large_weight.T], 1)) < 4e-4


def test_what_it_takes_is_known_before(make: Any) -> None:
    weight, bias = floats(47, 200), floats(47, 1)[:, 0]
    eight = [Int8Options(), Int8Options(group=32), Int8Options(group=None)]
    for options in (*eight, Int4Options(), Int4Options(offsets=False)):
        compare_plan(make(options), [stored(weight)])
        compare_plan(make(options), [stored(weight, bias=bias), stored(weight, "a.v_proj", bias)])
    for kind in FORMATS:
        part, _ = blocks(kind.name, 40, 512)
        compare_plan(make(GgufOptions()), [part, blocks("Q8_0", 24, 512)[0]])


def test_graphs_may_record_it(make: Any) -> None:
    layer = make(Int8Options()).linear([stored(floats(40, 64))])
    assert isinstance(layer, TritonLinear)
    assert layer.capturable


def test_a_model_draws_the_same_tokens_alone_and_in_a_batch(tmp_path: Path, make: Any) -> None:
    """With weights of four and of eight bits."""
    folder = save(make_model("qwen2", num_hidden_layers=1), tmp_path)
    prompts = [[5, 9, 40, 11, 60, 33, 2], list(range(3, 24))]

    def drawn(prompts: list[list[int]]) -> list[list[int]]:
        driver = native_runner(folder, quantization=make(Int4Options(), "float32"))
        for slot, prompt in enumerate(prompts):
            driver.add(slot, prompt)
        for _ in range(4):
            driver.step()
        return [driver.outputs(slot) for slot in range(len(prompts))]

    assert drawn(prompts) == [drawn([prompt])[0] for prompt in prompts]


def test_weights_that_no_float16_scale_reaches(make: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"model.layers.0.mlp.up_proj.*exclude"):
        make(Int4Options()).linear([stored(floats(32, 64) * 1e6)])


def test_a_device_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet_quantization.accelerator.runs_here", lambda device: device.type == "cuda")
    quantization = Int8(context("xpu"), Int8Options())
    with pytest.raises(PluginError, match="the device is xpu: leave plugins.quantization out"):
        quantization.linear([stored(floats(32, 32))])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (Int8Options(activations="int16"), "activations"),
        (Int8Options(activation_group=32), "activation_group"),
        (Int4Options(activations="int8"), "activations"),
        (GgufOptions(activation_group=None), "activation_group"),
    ],
)
def test_options_about_activations_have_no_effect(options: Any, name: str, make: Any) -> None:
    with pytest.raises(PluginError, match=rf"plugins\.quantization\.{name} has no effect on cuda:0: leave it out"):
        make(options)


# ------------------------------------------------------------------ torchao


@pytest.mark.parametrize(("outputs", "columns"), [(48, 64), (45, 61)])
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_torchao_multiplies_eight_bits(activations: Any, outputs: int, columns: int, make: Any) -> None:
    """The real one, on tensors of the CPU."""
    weight, bias = floats(outputs, columns), torch.linspace(-1, 1, outputs)
    quantization = make(Int8Options(backend="torchao", activations=activations))
    layer = quantization.linear([stored(weight, UP, bias), stored(weight, UP)])
    assert (layer.in_features, layer.out_features) == (columns, 2 * outputs)
    x = tokens(3, columns).bfloat16()
    exact = torch.cat([x.float() @ weight.T + bias, x.float() @ weight.T], 1)
    got = layer(x)
    assert got.shape == exact.shape
    assert error(got.float(), exact) < 0.015
    # What torchao multiplies with is of sizes that it does not send to the CPU.
    held = layer._module.weight
    assert all(size % 8 == 0 for size in held.shape)
    tensors = [getattr(held, name) for name in held.__tensor_flatten__()[0]]
    assert layer.weight_bytes == sum(tensor.nbytes for tensor in tensors) + layer._module.bias.nbytes
    assert not layer.capturable


def test_torchao_takes_blocks(make: Any) -> None:
    part, weight = blocks("Q5_0", 40, 256)
    layer = make(Int8Options(backend="torchao")).linear([part])
    x = tokens(3, 256)
    assert error(layer(x.bfloat16()).float(), x @ weight.T) < 0.02


def test_four_bits_of_torchao() -> None:
    """They cannot be made without a GPU."""
    quantization = Int4(context("cuda", "bfloat16"), Int4Options(backend="torchao"))
    config = quantization._torchao_config(stored(floats(32, 32), UP))
    assert type(config).__name__ == "Int4WeightOnlyConfig"
    assert config.group_size == 32
    assert str(config.int4_packing_format) == "tile_packed_to_4d"
    # Rows are filled up to 1024 values, and each group has a scale and a zero in bfloat16.
    part = stored(floats(20, 96), UP)
    assert quantization.planned_bytes([part], bias=False) == 24 * (1024 // 2 + 1024 // 32 * 4)
    assert quantization.planned_bytes([part], bias=True) == 24 * (1024 // 2 + 1024 // 32 * 4) + 24 * 2


@pytest.mark.parametrize(
    ("options", "name", "config"),
    [
        (Int4Options(backend="torchao"), DOWN, "Int8WeightOnlyConfig"),
        (Int4Options(backend="torchao"), HEAD, "Int8WeightOnlyConfig"),
        (Int4Options(backend="torchao", lm_head=4), HEAD, "Int4WeightOnlyConfig"),
        (Int8Options(backend="torchao"), HEAD, "Int8DynamicActivationInt8WeightConfig"),
    ],
)
def test_which_bits_torchao_is_asked_for(options: Any, name: str, config: str, make: Any) -> None:
    assert type(make(options)._torchao_config(stored(floats(32, 32), name))).__name__ == config


def test_plans_of_torchao(make: Any) -> None:
    weight, bias = floats(45, 61), torch.arange(45.0)
    for options, name in ((Int8Options(backend="torchao"), UP), (Int4Options(backend="torchao"), "a.v_proj")):
        compare_plan(make(options), [stored(weight, name, bias), stored(weight, name, bias)])
        compare_plan(make(options), [stored(weight, name)])


def test_four_bits_of_torchao_want_bfloat16_and_whole_groups() -> None:
    quantization = Int4(context("cuda", "float16"), Int4Options(backend="torchao"))
    assert not quantization.accepts("up_proj", (64, 48), "float16")
    assert Int4(context("cuda", "float16"), Int4Options()).accepts("up_proj", (64, 48), "float16")
    with pytest.raises(PluginError, match=r"dtype is float16: set dtype to bfloat16, or plugins.quantization.backend"):
        quantization.linear([stored(floats(32, 32))])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (Int8Options(backend="torchao", group=64), "group"),
        (Int8Options(backend="torchao", activation_group=128), "activation_group"),
        (Int4Options(backend="torchao", offsets=False), "offsets"),
        (Int4Options(backend="torchao", activations="int16"), "activations"),
    ],
)
def test_options_that_torchao_has_no_use_for(options: Any, name: str, make: Any) -> None:
    with pytest.raises(
        PluginError, match=rf"plugins\.quantization\.{name} has no effect on torchao.* set .* to triton"
    ):
        make(options)


def test_torchao_that_is_not_installed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    quantization = make(Int8Options(backend="torchao"))
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(PluginError, match=r"pip install 'trivet\[torchao\]', or leave backend out"):
        quantization.linear([stored(floats(32, 32))])


def test_warnings_about_other_kernels_of_torchao_are_not_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchao.kernels")
    with adapter._quiet("torchao"):
        logger.warning("cannot be loaded")
    assert not caplog.records
    logger.warning("later")
    assert [record.message for record in caplog.records] == ["later"]
