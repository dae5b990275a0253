"""With torch.compile the tokens are the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from native_kit import make_model, native_runner, save
from worker_kit import greedy

PROMPTS = [[5, 9, 40, 11, 60, 33, 2], [2, 33, 60, 11, 40]]
COUNT = 4


def _inductor_problem() -> str | None:
    """Why inductor cannot compile here: it needs a C++ compiler on a CPU."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(3))
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is the reason
        return f"{type(exc).__name__}: {str(exc).splitlines()[0]}"
    return None


def _num_graphs(name: str, model: Any) -> int:
    """How many pieces are compiled for two requests, one of whose prompts comes in chunks; checks their tokens."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    driver = native_runner(name, compile=True)
    for slot, prompt in enumerate(PROMPTS):
        driver.add(slot, prompt)
    driver.step({0: 4, 1: 5})
    for _ in range(COUNT):
        driver.step()
    for slot, prompt in enumerate(PROMPTS):
        assert driver.outputs(slot)[:COUNT] == greedy(model, prompt, COUNT)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_compiled_pieces_give_the_same_tokens(tmp_path: Path) -> None:
    reason = _inductor_problem()
    if reason is not None:
        pytest.skip(f"torch.compile does not run here: {reason}")
    model = make_model("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    # What precedes attention in the first layer and in others, and what follows it: whatever the layer and the rows.
    assert _num_graphs(save(model, tmp_path), model) == 3


@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_moe"])
def test_mixtures_of_experts_lie_between_compiled_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = make_model(case, num_hidden_layers=2)
    assert _num_graphs(save(model, tmp_path), model) == 2
