"""GPT-OSS: sinks, clamped activations and stacked experts with biases, whichever attention it runs on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native_kit import make_model, make_native, native_runner, save
from worker_kit import Driver, all_logits, greedy

from trivet.errors import ModelLoadError
from trivet.roles import Attention
from trivet_cpu_attention.attention import CpuAttention
from trivet_native.moe import ClampedSwiGLU
from trivet_native.suits import RANK, suits
from trivet_schemas.config import EngineConfig
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


def test_four_bit_weights_are_declined(made: tuple[str, Any], tmp_path: Path) -> None:
    given = json.loads((Path(made[0]) / "config.json").read_text())
    given["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    answer = suits(EngineConfig(model=str(tmp_path)))
    assert answer.rank is None
    assert "experts are stored in MXFP4 (quantization_config)" in answer.reason


def test_an_expert_that_is_missing_is_named(made: tuple[str, Any], tmp_path: Path) -> None:
    for path in Path(made[0]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_local_experts": 5}))
    with pytest.raises(ModelLoadError, match=r"mlp\.router\.weight.*\[4, 32\] instead of \[5, 32\]"):
        make_native(str(tmp_path)).load()
