"""From a GGUF file the native model computes what the transformers model computes with the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from native_kit import LONGEST, native_runner
from test_gguf_models import MODELS, make_model, write_gguf
from worker_kit import Driver, all_logits, greedy

from trivet_native.fields import GGUF_ARCHITECTURES
from trivet_native.suits import RANK, suits
from trivet_schemas.config import EngineConfig
from trivet_torch.weights import load_causal_lm

SERVED = sorted(name for name, (architecture, _) in MODELS.items() if architecture in GGUF_ARCHITECTURES)
EXPERTS = ["mixtral", "qwen2moe", "qwen3moe"]
PROMPT = [3 + (7 * i) % 90 for i in range(37)]
STEPS = 6


def _network(name: str) -> Any:
    """A model whose norms do not make everything small."""
    model = make_model(name)
    for parameter, value in model.named_parameters():
        if parameter.endswith("norm.weight") and not name.startswith("gemma"):
            value.data += 1
    return model


def _compare(path: Path) -> Driver:
    """Chunks beside another row, and tokens one by one, give transformers' logits and tokens."""
    assert suits(EngineConfig(model=str(path))).rank == RANK
    model, _ = load_causal_lm(path, dtype=torch.float32, attn_implementation="eager")
    driver = native_runner(str(path))
    driver.add(0, PROMPT)
    driver.add(1, PROMPT[::-1])
    driver.step({0: 13, 1: 37})
    driver.step({0: 24, 1: 1})
    for _ in range(STEPS - 1):
        driver.step()
    sampler = driver.context.roles["sampler"]
    found = sampler.logits[-1][sampler.seen[-1].row_slots == 0][-1]
    expected = all_logits(model, [*PROMPT, *driver.outputs(0)[:-1]])[-1]
    assert expected.std() > 0.5, "logits must differ enough for the comparison to mean something"
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert driver.outputs(0) == greedy(model, PROMPT, STEPS)
    return driver


def test_every_architecture_is_tried() -> None:
    assert {MODELS[name][0] for name in SERVED} == GGUF_ARCHITECTURES
    assert len(PROMPT) + STEPS <= LONGEST


@pytest.mark.parametrize("name", SERVED)
def test_logits_and_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    _compare(write_gguf(tmp_path / "model.gguf", _network(name), MODELS[name][0]))


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_stacks_of_quantised_experts(name: str, kind: str, tmp_path: Path) -> None:
    ggml_type = GGMLQuantizationType[kind]

    def quantise(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        stacks = [key for key in tensors if key.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight"))]
        assert stacks
        for key in stacks:
            writer.add_tensor(key, quants.quantize(tensors.pop(key), ggml_type), raw_dtype=ggml_type)

    _compare(write_gguf(tmp_path / "model.gguf", _network(name), MODELS[name][0], change=quantise))
