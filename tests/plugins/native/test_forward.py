"""What a forward pass gives besides logits, what it refuses, and what the model says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_kit import VOCAB, WINDOW, make_model, make_native, native_runner, save
from worker_kit import Driver, all_logits

from trivet.plan import LogitsRows
from trivet.roles import ForwardBatch
from trivet_native import layers, loading
from trivet_native.layers import slices

PROMPT = [3 + (7 * i) % 70 for i in range(21)]


def _batch(driver: Driver, rows: list[int], **fields: Any) -> ForwardBatch:
    """The prompt as the only row, with the given tokens' logits."""
    captured: list[ForwardBatch] = []
    driver.context.hooks.forward = lambda batch: (captured.append(batch), driver.model.forward(batch))[1]
    driver.add(0, PROMPT)
    driver.step()
    batch = captured[0]
    batch.logits_indices = torch.tensor(rows, dtype=torch.long)
    batch.logits_rows = np.array([LogitsRows.NONE], np.uint8)
    for key, value in fields.items():
        setattr(batch, key, value)
    return batch


@torch.inference_mode()
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_hidden_states_of_layers_and_of_the_end_equal_transformers(tmp_path: Path, case: str) -> None:
    model = make_model(case)
    driver = native_runner(save(model, tmp_path))
    output = driver.model.forward(_batch(driver, [4, 20], wants_hidden=True, hidden_layers=(0, 2)))
    expected = model.model(input_ids=torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(output.hidden, expected.last_hidden_state[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(output.logits, all_logits(model, PROMPT)[[4, 20]], atol=2e-5, rtol=0)
    assert sorted(output.layer_outputs) == [0, 2]
    for layer, states in output.layer_outputs.items():
        # The first of transformers' states is the embedding, and its last one is normalised.
        if layer + 1 < model.config.num_hidden_layers:
            torch.testing.assert_close(states, expected.hidden_states[layer + 1][0], atol=2e-5, rtol=0)


@torch.inference_mode()
def test_only_the_wanted_rows_reach_the_head(tmp_path: Path) -> None:
    model = make_model("gemma2")
    driver = native_runner(save(model, tmp_path))
    batch = _batch(driver, [4, 20, 7])
    torch.testing.assert_close(
        driver.model.forward(batch).logits, all_logits(model, PROMPT)[[4, 20, 7]], atol=2e-5, rtol=0
    )
    batch.logits_indices = torch.empty(0, dtype=torch.long)
    output = driver.model.forward(batch)
    assert output.logits.shape == (0, VOCAB)
    assert output.hidden is None


@pytest.mark.parametrize("change", [{"multimodal": ["image"]}, {"adapters": np.array([0], np.int32)}])
def test_inputs_that_it_does_not_serve_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    driver = native_runner(save(make_model("llama"), tmp_path))
    with pytest.raises(ValueError, match="neither multimodal inputs nor adapters"):
        driver.model.forward(_batch(driver, [0], **change))


def test_windows_and_shapes_are_the_models(tmp_path: Path) -> None:
    driver = native_runner(save(make_model("gemma3"), tmp_path))
    sliding = ("sliding", WINDOW, 2, 16, "float32")
    found = [(s.kind, s.window, s.num_kv_heads, s.head_dim, s.dtype) for s in driver.info.specs]
    assert found == [sliding, sliding, ("full", None, 2, 16, "float32"), sliding]
    info = driver.info.model
    assert (info.vocab_size, info.num_layers, info.hidden_size) == (VOCAB, 4, 32)
    assert (info.architecture, info.tasks, info.dtype) == ("Gemma3ForCausalLM", ("generate", "embed"), "float32")


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    model = make_native(save(make_model("mistral"), tmp_path), max_model_len=WINDOW)
    model.load()
    assert {s.kind for s in model.kv_specs()} == {"full"}


def test_weight_bytes_are_those_of_all_parameters_but_the_embedding(tmp_path: Path) -> None:
    network = make_model("llama")
    model = make_native(save(network, tmp_path))
    model.load()
    total = sum(p.nbytes for p in network.parameters()) - network.get_input_embeddings().weight.nbytes
    # Packed layouts round sizes up to a multiple of their blocks.
    assert total <= model.weight_bytes <= 1.5 * total


def test_a_row_does_not_depend_on_its_batch_mates(tmp_path: Path) -> None:
    """A mixture of experts, where neighbours share the products of an expert."""
    driver = native_runner(save(make_model("qwen2_moe"), tmp_path))
    alone = _first_logits(driver, [PROMPT])
    together = _first_logits(driver, [PROMPT, PROMPT[3:9], [7], PROMPT[::-1]])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def _first_logits(driver: Driver, prompts: list[list[int]]) -> torch.Tensor:
    for slot, prompt in enumerate(prompts):
        driver.add(slot, prompt)
    driver.step()
    sampler = driver.context.roles["sampler"]
    logits: torch.Tensor = sampler.logits[-1][sampler.seen[-1].row_slots == 0][-1]
    for slot in range(len(prompts)):
        driver.drop(slot)
    return logits


@pytest.mark.parametrize("case", ["qwen2", "gemma3", "qwen2_moe"])
def test_slices_of_a_long_step_make_no_difference(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(make_model(case), tmp_path / "model")
    prompts = [PROMPT, PROMPT[:3], PROMPT[::-1]]
    whole = _first_logits(native_runner(name), prompts)
    cut: list[int] = []
    monkeypatch.setattr(layers, "SLICE", 8)
    monkeypatch.setattr(loading, "SLICE", 8)
    monkeypatch.setattr(layers, "slices", lambda rows: (cut.append(rows), slices(rows))[1])
    sliced = _first_logits(native_runner(name), prompts)
    torch.testing.assert_close(sliced, whole, rtol=0, atol=1e-5)
    assert cut.count(sum(map(len, prompts))) >= 3  # in every layer at least the projection before attention
