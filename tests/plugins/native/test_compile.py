"""With torch.compile the tokens are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from native_kit import make_model, native_runner, save
from worker_kit import greedy

PROMPT = [5, 9, 40, 11, 60, 33, 2]


def _inductor_problem() -> str | None:
    """Why inductor cannot compile here: it needs a C++ compiler on a CPU."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(3))
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is the reason
        return f"{type(exc).__name__}: {str(exc).splitlines()[0]}"
    return None


@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.parametrize("case", ["gemma3"])
def test_compiled_pieces_give_the_same_tokens(tmp_path: Path, case: str) -> None:
    reason = _inductor_problem()
    if reason is not None:
        pytest.skip(f"torch.compile does not run here: {reason}")
    model = make_model(case)
    driver = native_runner(save(model, tmp_path), compile=True)
    driver.add(0, PROMPT)
    driver.step({0: 4})
    for _ in range(5):
        driver.step()
    assert driver.outputs(0) == greedy(model, PROMPT, 5)
    # One graph per piece serves all layers and all lengths but one; without that every layer would compile anew.
    counters = torch._dynamo.utils.counters["stats"]
    assert counters["unique_graphs"] <= 12
