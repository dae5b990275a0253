"""The transformers model: logits equal the library's eager attention for every family, however a prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_kit import FAMILIES, VOCAB, Context, Driver, all_logits, greedy, make_model, make_runner, save_model

from trivet.plan import LogitsRows
from trivet.roles import ForwardBatch
from trivet_torch.dtypes import resolve_dtype
from trivet_transformers.model import TransformersModel

PROMPT = [3 + (7 * i) % 90 for i in range(21)]
OTHER = [5, 9, 40, 11, 60, 33, 2, 71, 18, 25]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model(request.param)
    return save_model(model, tmp_path_factory.mktemp(request.param)), model


def step_logits(driver: Driver, slot: int) -> torch.Tensor:
    """The logits that the last step sampled a slot's token from."""
    sampler = driver.context.roles["sampler"]
    rows = sampler.seen[-1]
    return sampler.logits[-1][rows.row_slots == slot][-1]


def test_logits_equal_eager_attention(made: tuple[str, Any]) -> None:
    name, model = made
    driver = make_runner(name, 4)
    driver.add(0, PROMPT)
    driver.add(3, OTHER)
    driver.step({0: 13, 3: 10})
    driver.step({0: 8, 3: 1})
    for _ in range(4):
        driver.step()
        for slot, prompt in ((0, PROMPT), (3, OTHER)):
            tokens = prompt + driver.outputs(slot)
            expected = all_logits(model, tokens[:-1])[-1]
            assert expected.std() > 1, "logits must differ enough for the comparison to mean something"
            torch.testing.assert_close(step_logits(driver, slot), expected, atol=1e-5, rtol=0)
    for slot, prompt in ((0, PROMPT), (3, OTHER)):
        assert driver.outputs(slot) == greedy(model, prompt, len(driver.outputs(slot)))


def test_windows_and_shapes_are_the_models(tmp_path: Path) -> None:
    driver = make_runner(save_model(make_model("gemma2"), tmp_path), 4)
    assert [(s.kind, s.window, s.num_kv_heads, s.head_dim, s.dtype) for s in driver.info.specs] == [
        ("sliding", 8, 2, 16, "float32"),
        ("full", None, 2, 16, "float32"),
    ] * 2


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    driver = make_runner(save_model(make_model("mistral", sliding_window=64), tmp_path), 4, max_model_len=64)
    assert {s.kind for s in driver.info.specs} == {"full"}


def test_keys_and_values_may_differ_in_size(tmp_path: Path) -> None:
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    driver = make_runner(save_model(model.train(mode=False), tmp_path), 4)
    assert {(s.head_dim, s.v_head_dim) for s in driver.info.specs} == {(16, 12)}
    driver.add(0, PROMPT)
    driver.step({0: 9})
    driver.step()
    torch.testing.assert_close(step_logits(driver, 0), all_logits(model, PROMPT)[-1], atol=1e-5, rtol=0)


def test_attention_sinks_reach_the_attention_provider(tmp_path: Path) -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=64, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2)
    driver = make_runner(save_model(model.train(mode=False), tmp_path), 4)
    driver.add(0, PROMPT)
    driver.step({0: 9})
    driver.step()
    torch.testing.assert_close(step_logits(driver, 0), all_logits(model, PROMPT)[-1], atol=1e-5, rtol=0)


def _batch(driver: Driver, rows: list[int], *, hidden: bool) -> ForwardBatch:
    """The prompt as the only row, with the given tokens' logits."""
    captured: list[ForwardBatch] = []
    driver.context.hooks.forward = lambda batch: (captured.append(batch), driver.context.roles["model"].forward(batch))[
        1
    ]
    driver.add(0, PROMPT)
    driver.step()
    batch = captured[0]
    batch.logits_indices, batch.wants_hidden = torch.tensor(rows, dtype=torch.long), hidden
    batch.logits_rows = np.array([LogitsRows.NONE], np.uint8)
    return batch


@torch.inference_mode()
def test_only_the_wanted_rows_reach_the_head(made: tuple[str, Any]) -> None:
    name, model = made
    driver = make_runner(name, 4)
    widths: list[int] = []
    loaded = driver.context.roles["model"]
    loaded._model.get_output_embeddings().register_forward_hook(lambda m, args, out: widths.append(args[0].shape[1]))
    batch = _batch(driver, [4, 20, 7], hidden=True)
    widths.clear()
    output = loaded.forward(batch)
    torch.testing.assert_close(output.logits, all_logits(model, PROMPT)[[4, 20, 7]], atol=1e-5, rtol=0)
    hidden = model.base_model(input_ids=torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(output.hidden, hidden, atol=1e-5, rtol=0)
    batch.logits_indices, batch.wants_hidden = torch.empty(0, dtype=torch.long), False
    output = loaded.forward(batch)
    assert output.logits.shape[0] == 0
    assert output.hidden is None
    assert widths == [3]


@torch.inference_mode()
def test_a_head_that_takes_no_rows_is_given_only_those_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    model = make_model("gemma2")
    inner = transformers.Gemma2ForCausalLM.forward

    def forward(
        self: Any, input_ids: Any = None, position_ids: Any = None, use_cache: Any = None, **kwargs: Any
    ) -> Any:
        assert "logits_to_keep" not in kwargs
        return inner(self, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, **kwargs)

    expected = all_logits(model, PROMPT)[[4, 20]]
    monkeypatch.setattr(transformers.Gemma2ForCausalLM, "forward", forward)
    driver = make_runner(save_model(model, tmp_path), 4)
    batch = _batch(driver, [4, 20], hidden=False)
    # The soft cap behind the head applies to these rows.
    torch.testing.assert_close(driver.context.roles["model"].forward(batch).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("change", [{"multimodal": ["image"]}, {"adapters": np.array([0], np.int32)}])
def test_inputs_that_it_does_not_serve_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    driver = make_runner(save_model(make_model("llama"), tmp_path), 4)
    batch = _batch(driver, [0], hidden=False)
    for key, value in change.items():
        setattr(batch, key, value)
    with pytest.raises(ValueError, match="neither multimodal inputs nor adapters"):
        driver.context.roles["model"].forward(batch)


def test_two_models_in_one_process_do_not_meet(tmp_path: Path) -> None:
    one, two = make_model("llama"), make_model("qwen3")
    drivers = [make_runner(save_model(m, tmp_path / str(i)), 4) for i, m in enumerate((one, two))]
    for driver in drivers:
        driver.add(0, OTHER)
    for _ in range(3):
        for driver in drivers:
            driver.step()
    assert [d.outputs(0) for d in drivers] == [greedy(one, OTHER, 3), greedy(two, OTHER, 3)]


def test_shutdown_takes_the_hooks_off(tmp_path: Path) -> None:
    model = TransformersModel(Context(save_model(make_model("llama"), tmp_path)))
    model.shutdown()  # half-built: nothing to do
    model.load()
    model.shutdown()
    assert not model._model.base_model._forward_hooks


@pytest.mark.parametrize(("stored", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_auto_takes_the_type_of_the_folder(tmp_path: Path, stored: str, expected: torch.dtype) -> None:
    name = save_model(make_model("llama").to(getattr(torch, stored)), tmp_path)
    assert resolve_dtype("auto", name, "cpu") is expected
    assert resolve_dtype("float16", name, "cpu") is torch.float16
