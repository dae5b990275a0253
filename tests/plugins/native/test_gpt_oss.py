"""GPT-OSS: sinks, clamped activations and stacked experts with biases, whichever attention it runs on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native_kit import make_model, make_native, native_runner, save
from safetensors.torch import load_file, save_file
from worker_kit import Driver, all_logits, greedy

from trivet.errors import ModelLoadError
from trivet.launcher._model_files import read_model
from trivet.model_source import ModelLocation
from trivet.roles import Attention
from trivet_cpu_attention.attention import CpuAttention
from trivet_native.moe import ClampedSwiGLU
from trivet_native.suits import RANK, suits
from trivet_schemas.config import EngineConfig
from trivet_torch.weights.stored import open_weights
from trivet_torch_attention.attention import TorchAttention

PROMPT = [3 + (7 * i) % 70 for i in range(29)]
OTHERS = [[5, 9, 40, 11, 60, 33, 2, 71, 18, 25], [7], PROMPT[::-1]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model("gpt_oss")
    return save(model, tmp_path_factory.mktemp("model")), model


@pytest.fixture(params=[TorchAttention, CpuAttention])
def attention(request: pytest.FixtureRequest) -> Attention:
    provider: Attention = request.param(SimpleNamespace(device="cpu"))
    return provider


def _logits(driver: Driver, slot: int) -> torch.Tensor:
    sampler = driver.context.roles["sampler"]
    logits: torch.Tensor = sampler.logits[-1][sampler.seen[-1].row_slots == slot][-1]
    return logits


def test_logits_and_tokens_equal_transformers(made: tuple[str, Any], attention: Attention) -> None:
    """In chunks beside other rows, beyond the windows, and then token by token."""
    name, model = made
    driver = native_runner(name, attention=attention)
    driver.add(0, PROMPT)
    for slot, prompt in enumerate(OTHERS, 1):
        driver.add(slot, prompt)
    driver.step({0: 13, 1: 4, 2: 1, 3: 29})
    driver.step({0: 16, 1: 6, 2: 1, 3: 1})
    for _ in range(10):
        driver.step()
        expected = all_logits(model, [*PROMPT, *driver.outputs(0)[:-1]])[-1]
        assert expected.std() > 1, "logits must differ enough for the comparison to mean something"
        torch.testing.assert_close(_logits(driver, 0), expected, atol=2e-5, rtol=0)
    assert driver.outputs(0) == greedy(model, PROMPT, len(driver.outputs(0)))
    assert driver.outputs(1) == greedy(model, OTHERS[0], len(driver.outputs(1)))


def test_a_row_does_not_depend_on_its_batch_mates(made: tuple[str, Any], attention: Attention) -> None:
    driver = native_runner(made[0], attention=attention)
    driver.add(0, PROMPT)
    driver.step()
    alone = _logits(driver, 0)
    driver.drop(0)
    for slot, prompt in enumerate([PROMPT, *OTHERS]):
        driver.add(slot, prompt)
    driver.step()
    torch.testing.assert_close(_logits(driver, 0), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    x = (torch.randn(5, 24, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    experts = GptOssExperts(GptOssConfig(hidden_size=2, intermediate_size=12, num_local_experts=1))
    before, out = x.clone(), torch.empty(5, 12, dtype=dtype)
    activation = ClampedSwiGLU(1.702, 7.0)
    expected = experts._apply_gate(x.float()).to(dtype)
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(activation(x), expected, atol=0, rtol=rounding)
    assert activation(x, out) is out
    assert torch.equal(out, activation(x))
    assert torch.equal(x, before)


def test_the_fields_of_published_files_are_known(made: tuple[str, Any], tmp_path: Path) -> None:
    given = json.loads((Path(made[0]) / "config.json").read_text())
    rope = given.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    published = {"experts_per_token": 2, "initial_context_length": 64, "rope_theta": theta, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(given | published))
    assert suits(EngineConfig(model=str(tmp_path))).rank == RANK


def slowly_widened(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]`` of blocks ``[rows, groups, 16]`` and scales ``[rows, groups]``, one number at a time: a bit
    of sign, two of the exponent, one of the mantissa, the low half of a byte first."""
    rows, groups, _ = blocks.shape
    out = torch.zeros(rows, groups * 32)
    for row in range(rows):
        for column in range(groups * 32):
            byte = int(blocks[row, column // 32, column % 32 // 2])
            bits = byte >> 4 if column % 2 else byte & 15
            exponent, mantissa = bits >> 1 & 3, bits & 1
            number = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            out[row, column] = (-1 if bits & 8 else 1) * number * 2.0 ** (int(scales[row, column // 32]) - 127)
    return out


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A folder with experts in MXFP4, as the published ones have them, and the model that it describes."""
    model = make_model("gpt_oss", intermediate_size=64, num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("four bits")
    save(model, folder)
    config, path = folder / "config.json", folder / "model.safetensors"
    weights, generator = load_file(path), torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = weights.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide = torch.stack([slowly_widened(*expert) for expert in zip(blocks, scales, strict=True)])
        model.get_parameter(name).data.copy_(wide.transpose(1, 2))
    save_file(weights, path, metadata={"format": "pt"})
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantized}))
    return str(folder), model


def test_experts_in_four_bits_are_served(four_bits: tuple[str, Any]) -> None:
    name, model = four_bits
    assert suits(EngineConfig(model=name)).rank == RANK
    driver = native_runner(name)
    driver.add(0, PROMPT)
    for _ in range(8):
        driver.step()
        expected = all_logits(model, [*PROMPT, *driver.outputs(0)[:-1]])[-1]
        assert expected.std() > 1, "logits must differ enough for the comparison to mean something"
        torch.testing.assert_close(_logits(driver, 0), expected, atol=2e-5, rtol=0)
    assert driver.outputs(0) == greedy(model, PROMPT, len(driver.outputs(0)))


def test_experts_in_four_bits_are_read_as_a_whole_and_by_rows(four_bits: tuple[str, Any]) -> None:
    name, model = four_bits
    weights = open_weights(name)
    expert = "model.layers.1.mlp.experts.2.gate_up_proj"
    expected = model.model.layers[1].mlp.experts.gate_up_proj[2].t()
    assert weights.shape(f"{expert}.weight") == expected.shape == (128, 32)
    assert torch.equal(weights.tensor(f"{expert}.weight", torch.float32), expected)
    assert torch.equal(weights.tensor(f"{expert}.weight", torch.bfloat16).float(), expected), "bfloat16 holds them"
    matrix = weights.matrix(f"{expert}.weight", torch.float32)
    assert torch.equal(matrix.rows(3, 17), expected[3:17])
    matrix.release(3, 17)
    weights.release(f"{expert}.weight")
    assert torch.equal(weights.rows(f"{expert}.weight", torch.tensor([5, 5, 0]), torch.float32), expected[[5, 5, 0]])
    stored = weights.linear(expert)
    assert torch.equal(stored.tensors["weight"].float(), expected)
    assert stored.tensors["bias"].shape == (128,)
    assert not [name for name in weights.names if name.endswith(("_blocks", "_scales"))]
    weights.close()


@pytest.mark.parametrize(("named", "expected"), [(None, "bfloat16"), ("float32", "float32")])
def test_experts_in_four_bits_make_a_model_in_bfloat16_unless_its_file_names_a_type(
    four_bits: tuple[str, Any], tmp_path: Path, named: str | None, expected: str
) -> None:
    for path in Path(four_bits[0]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": named}))
    assert make_native(str(tmp_path), dtype="auto").load().dtype == expected
    assert read_model(ModelLocation("hf", tmp_path), "auto", "cpu").dtype == expected


def test_four_bits_without_scales_are_missing_weights(four_bits: tuple[str, Any], tmp_path: Path) -> None:
    for path in Path(four_bits[0]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.endswith("down_proj_scales")}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"hold no tensor 'model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight'"):
        make_native(str(tmp_path)).load()


def test_other_families_in_four_bits_are_declined(tmp_path: Path) -> None:
    given = {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    answer = suits(EngineConfig(model=str(tmp_path)))
    assert answer.rank is None
    assert "quantised in mxfp4 (quantization_config)" in answer.reason


def test_an_expert_that_is_missing_is_named(made: tuple[str, Any], tmp_path: Path) -> None:
    for path in Path(made[0]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_local_experts": 5}))
    with pytest.raises(ModelLoadError, match=r"mlp\.router\.weight.*\[4, 32\] instead of \[5, 32\]"):
        make_native(str(tmp_path)).load()
