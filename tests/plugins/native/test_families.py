"""Every family computes what transformers computes: logits and greedy tokens in float32, however prompts are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from native_kit import CASES, LONGEST, VOCAB, make_model, native_runner, save
from worker_kit import all_logits

from trivet.engine import Engine
from trivet.testing.fakes import FakeTokenizer
from trivet_schemas.sampling import SamplingParams

PROMPT = [3 + (7 * i) % 70 for i in range(29)]
OTHER = [5, 9, 40, 11, 60, 33, 2, 71, 18, 25]
COUNT = 14


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model(request.param)
    return save(model, tmp_path_factory.mktemp("model")), model


def test_logits_equal_eager_attention(made: tuple[str, Any]) -> None:
    name, model = made
    driver = native_runner(name)
    sampler = driver.context.roles["sampler"]
    driver.add(0, PROMPT)
    driver.add(3, OTHER)
    driver.step({0: 13, 3: 10})
    driver.step({0: 16, 3: 1})
    for _ in range(4):
        driver.step()
        rows = sampler.seen[-1]
        for slot, prompt in ((0, PROMPT), (3, OTHER)):
            expected = all_logits(model, [*prompt, *driver.outputs(slot)[:-1]])[-1]
            assert expected.std() > 1, "logits must differ enough for the comparison to mean something"
            found = sampler.logits[-1][rows.row_slots == slot][-1]
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_greedy_tokens_equal_generate(made: tuple[str, Any]) -> None:
    """Through the engine, with chunks, prefix hits, and more requests than fit into a step."""
    name, model = made
    rng = random.Random(1)
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    lengths = [1, 2, 7, 15, 16, 17, 33, 40]
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    prompts += [shared + prompt[:9] for prompt in prompts[2:5]]
    want = [_generate(model, prompt) for prompt in prompts]
    settings = {
        "model": name,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": LONGEST,
        "plugins": {
            "model": "native",
            "cache": {"use": "paged", "block_size": 4, "num_blocks": 400},
            "scheduler": {"use": "continuous", "max_num_batched_tokens": 23, "max_num_seqs": 6},
        },
    }
    engine = Engine(settings, [FakeTokenizer()])
    done: dict[int, list[int]] = {}
    try:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True))
        while engine.has_work:
            for end in engine.step().finished:
                assert end.message is None, end.message
                done[int(end.request.request_id)] = list(end.request.output_ids)
        engine.check_integrity()
    finally:
        engine.shutdown()
    assert [done[i] for i in range(len(prompts))] == want


def _generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
