"""A sliding window of 512 with the real attention provider: chunked or not, prompts around the window and beyond it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_kit import all_logits, make_model, make_runner, save_model

from trivet_torch_attention.attention import TorchAttention

WINDOW = 512


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model("gemma3", sliding_window=WINDOW, max_position_embeddings=1024)
    return save_model(model, tmp_path_factory.mktemp("gemma")), model


@pytest.mark.parametrize("chunk", [128, 512, 1024])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 700])
def test_all_chunkings_equal_transformers(made: tuple[str, Any], length: int, chunk: int) -> None:
    name, model = made
    driver = make_runner(name, 16, attention=TorchAttention(SimpleNamespace(device="cpu"), None))
    prompt = [3 + (11 * i + i // 7) % 90 for i in range(length)]
    driver.add(0, prompt)
    while not driver.outputs(0):
        driver.step({0: min(chunk, length - driver.requests[0].computed)})
    while len(driver.outputs(0)) < 64:
        driver.step()
    output = driver.outputs(0)
    # One pass over everything gives the token that plain greedy takes at each position.
    expected = all_logits(model, prompt + output[:-1])[length - 1 :]
    assert output == expected.argmax(-1).tolist()
    logits = torch.cat(driver.context.roles["sampler"].logits)
    # Sums over 700 keys in another order; a key too many or too few makes a difference ten thousand times larger.
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=0)
