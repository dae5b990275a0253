"""Layers that attend in chunks: Llama 4's text model against transformers, whatever the chunks of its prompts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_kit import Context, Driver, all_logits, make_runner, save_model

from trivet.engine import Engine
from trivet.errors import ModelLoadError
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.sampling import SamplingParams
from trivet_torch_attention.attention import TorchAttention
from trivet_transformers.model import TransformersModel

CHUNK, VOCAB = 16, FakeTokenizer().size
PROMPT = [3 + (11 * i + i // 7) % 70 for i in range(75)]


def make_model(**changes: Any) -> Any:
    """Three chunked layers and one without rotary embedding that sees everything; every second one is a mixture of
    experts. The temperature of the full layer changes every 10 tokens."""
    import transformers

    values = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "num_local_experts": 4, "interleave_moe_layer_step": 2,
        "attention_chunk_size": CHUNK, "floor_scale": 10, "attn_scale": 0.7, "rms_norm_eps": 1e-5,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    } | changes  # fmt: skip
    config = transformers.Llama4TextConfig(**values)
    model = transformers.Llama4ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.lm_head.weight.mul_(4)
    return model.train(mode=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model()
    return save_model(model, tmp_path_factory.mktemp("llama4")), model


def torch_runner(name: str, **given: Any) -> Driver:
    return make_runner(name, 4, attention=TorchAttention(SimpleNamespace(device="cpu")), **given)


def test_the_layers_are_the_models(made: tuple[str, Any]) -> None:
    driver = torch_runner(made[0])
    chunked = ("chunked", CHUNK)
    assert [(s.kind, s.window) for s in driver.info.specs] == [chunked, chunked, chunked, ("full", None)]
    # One chunk holds the whole context.
    assert {s.kind for s in torch_runner(made[0], max_model_len=CHUNK).info.specs} == {"full"}


@pytest.mark.parametrize("budget", [1, 5, 16, 24, 75])
def test_logits_equal_eager_attention_for_every_chunking(made: tuple[str, Any], budget: int) -> None:
    name, model = made
    driver = torch_runner(name)
    sampler = driver.context.roles["sampler"]
    driver.add(0, PROMPT)
    driver.add(1, PROMPT[5:38])  # the batch's places of its tokens are not their positions
    while any(r.computed < r.num_prompt for r in driver.requests.values()):
        counts = {r.slot: min(budget, r.num_prompt - r.computed) for r in driver.requests.values()}
        driver.step({slot: count for slot, count in counts.items() if count})
    while len(driver.outputs(0)) < 2 * CHUNK + 3:
        driver.step()
    got = {
        slot: [logits[rows.row_slots == slot] for logits, rows in zip(sampler.logits, sampler.seen, strict=True)]
        for slot in (0, 1)
    }
    for slot, prompt in ((0, PROMPT), (1, PROMPT[5:38])):
        output = driver.outputs(slot)
        # One pass over everything gives the token that plain greedy takes at each position.
        expected = all_logits(model, prompt + output[:-1])[len(prompt) - 1 :]
        assert expected.std() > 1
        torch.testing.assert_close(torch.cat(got[slot]), expected, atol=1e-4, rtol=0)
        assert output == expected.argmax(-1).tolist()


def test_greedy_tokens_equal_generate_over_shared_blocks(made: tuple[str, Any]) -> None:
    """Through the engine: groups over one pool, blocks that leave their chunk, prefix hits, a pool for little more than
    one request."""
    name, model = made
    prompts = [PROMPT, PROMPT[:40], [*PROMPT[:64], 9, 9], PROMPT[:47], [7], PROMPT[:17]]
    want = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        want.append(out[0, len(prompt) :].tolist())
    for budget, num_blocks in ((7, 90), (200, None)):
        cache = {"use": "paged", "block_size": 4} | ({} if num_blocks is None else {"num_blocks": num_blocks})
        plugins = {"cache": cache, "scheduler": {"use": "continuous", "max_num_batched_tokens": budget}}
        settings = {"model": name, "dtype": "float32", "device": "cpu", "max_model_len": 128, "plugins": plugins}
        engine = Engine(settings, [FakeTokenizer()])
        done: dict[int, list[int]] = {}
        try:
            for repeat in range(2):
                for i, prompt in enumerate(prompts):
                    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
                    engine.add_request(str(i), prompt, params)
                while engine.has_work:
                    for end in engine.step().finished:
                        assert end.message is None, end.message
                        done[int(end.request.request_id)] = list(end.request.output_ids)
                assert [done[i] for i in range(len(prompts))] == want, f"round {repeat}"
            engine.check_integrity()
            assert engine.parts.cache.stats().prefix_hits > 0
        finally:
            engine.shutdown()


def test_a_model_without_a_chunk_size_is_refused(tmp_path: Path) -> None:
    model = make_model(attention_chunk_size=None, layer_types=["full_attention"] * 4)
    model.config.layer_types = ["chunked_attention"] * 4
    context = Context(save_model(model, tmp_path))
    with pytest.raises(ModelLoadError, match="chunked_attention, and config.json lacks attention_chunk_size"):
        TransformersModel(context).load()
