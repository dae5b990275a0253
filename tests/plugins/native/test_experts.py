"""Mixtures of experts whose matrices are stacked, as on GPUs, by Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from native_kit import make_model, native_runner, save
from worker_kit import all_logits, greedy

from trivet.roles import Quantization, StoredLinear
from trivet_kernels.moe import StackedExperts
from trivet_native.loading import Loader
from trivet_native.spec import ExpertsSpec
from trivet_torch.linear import PlainLinear

# Read when kernels are first imported, which a model leaves until it needs them.
os.environ.setdefault("TRITON_INTERPRET", "1")

PROMPTS = {0: [3 + (7 * i) % 70 for i in range(11)], 3: [5, 9, 40, 11, 60]}
CASES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[StackedExperts]:
    """What is stacked from now on, on the CPU."""
    pytest.importorskip("triton")
    made: list[StackedExperts] = []
    stack = Loader._stacked

    def keep(loader: Loader, path: str, experts: ExpertsSpec) -> StackedExperts | None:
        found = stack(loader, path, experts)
        made.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(Loader, "_stacked", keep)
    monkeypatch.setattr("trivet_kernels.moe.serves", lambda device: True)
    monkeypatch.setattr("trivet_torch.linear.can_pack", lambda dtype, device: False)
    return made


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str, stacked: list[StackedExperts]) -> None:
    model = make_model(case)
    driver = native_runner(save(model, tmp_path))
    experts = [layer for layer in driver.model._spec.layers if layer.experts is not None]
    assert len(stacked) == len(experts) > 1
    sampler = driver.context.roles["sampler"]
    for slot, prompt in PROMPTS.items():
        driver.add(slot, prompt)
    driver.step({0: 7, 3: 5})
    driver.step({0: 4, 3: 1})
    driver.step()
    rows = sampler.seen[-1]
    for slot, prompt in PROMPTS.items():
        expected = all_logits(model, [*prompt, *driver.outputs(slot)[:-1]])[-1]
        torch.testing.assert_close(sampler.logits[-1][rows.row_slots == slot][-1], expected, atol=2e-5, rtol=0)


def test_they_take_the_memory_of_their_weights(tmp_path: Path, stacked: list[StackedExperts]) -> None:
    model = make_model("gpt_oss")
    driver = native_runner(save(model, tmp_path))
    parts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert sum(experts.weight_bytes for experts in stacked) == sum(part.nbytes for part in parts)
    embeddings = model.get_input_embeddings().weight.nbytes  # read from the file
    assert driver.model.weight_bytes == sum(part.nbytes for part in model.parameters()) - embeddings


class OneExpert(Quantization):
    """Takes over one expert's matrices, as they are."""

    def accepts(self, name: str, shape: tuple[int, ...], stored: str) -> bool:
        return ".experts.2." in name

    def linear(self, parts: Sequence[StoredLinear]) -> PlainLinear:
        return PlainLinear(torch.cat([part.tensors["weight"] for part in parts]))


def test_where_one_is_quantised_all_are_layers_of_their_own(tmp_path: Path, stacked: list[StackedExperts]) -> None:
    model = make_model("mixtral")
    driver = native_runner(save(model, tmp_path), quantization=OneExpert())
    assert not stacked
    driver.add(0, PROMPTS[0])
    for _ in range(3):
        driver.step()
    assert driver.outputs(0) == greedy(model, PROMPTS[0], 3)
