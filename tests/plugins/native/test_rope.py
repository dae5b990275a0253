"""Rotary embeddings whose frequencies depend on the length: they are those of ``max_model_len`` for every request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from native_kit import CASES, make_model, make_native, native_runner, save
from worker_kit import all_logits, make_runner

from trivet.errors import ModelLoadError

LONG = [3 + (7 * i) % 70 for i in range(70)]
SHORT = [5, 9, 40, 11, 60, 33, 2, 71, 18, 25]
#: case → changes of its configuration, and a max_model_len beyond the length that the model was first trained for
BEYOND: dict[str, tuple[dict[str, Any], int]] = {
    "longrope": ({}, 90),
    "dynamic rope": ({"max_position_embeddings": 48}, 90),
}


def logits_at_length(model: Any, ids: list[int], length: int) -> torch.Tensor:
    """The logits behind ``ids`` as transformers computes them in a sequence of ``length`` tokens: attention is causal,
    so that what follows them decides about the frequencies alone."""
    return all_logits(model, ids + [3] * (length - len(ids)))[len(ids) - 1]


def make_driver(kind: str, name: str, max_model_len: int) -> Any:
    if kind == "native":
        return native_runner(name, max_model_len=max_model_len)
    return make_runner(name, 4, max_model_len=max_model_len)


@pytest.mark.parametrize("kind", ["native", "transformers"])
@pytest.mark.parametrize("case", BEYOND)
def test_every_request_has_the_frequencies_of_the_whole_context(case: str, kind: str, tmp_path: Path) -> None:
    changes, length = BEYOND[case]
    model = make_model(case, **changes)
    driver = make_driver(kind, save(model, tmp_path), length)
    sampler = driver.context.roles["sampler"]
    driver.add(0, LONG)
    driver.add(3, SHORT)
    driver.step({0: 40, 3: 10})
    driver.step({0: 30, 3: 1})
    for _ in range(3):
        driver.step()
        rows = sampler.seen[-1]
        for slot, prompt in ((0, LONG), (3, SHORT)):
            ids = [*prompt, *driver.outputs(slot)[:-1]]
            expected = logits_at_length(model, ids, length)
            found = sampler.logits[-1][rows.row_slots == slot][-1]
            torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)
    short = all_logits(model, SHORT)[-1]
    assert (short - logits_at_length(model, SHORT, length)).abs().max() > 0.1, "the length makes a difference"


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_the_context_is_the_original_one_unless_more_is_asked_for(kind: str, tmp_path: Path) -> None:
    name = save(make_model("longrope"), tmp_path)

    def context(max_model_len: int | None) -> int:
        driver: Any
        if kind == "native":
            return make_native(name, max_model_len=max_model_len).load().max_model_len
        driver = make_runner(name, 4, max_model_len=max_model_len)
        length: int = driver.info.model.max_model_len
        return length

    assert context(None) == 64
    assert context(40) == 256
    assert context(65) == 256


def test_dynamic_frequencies_reach_as_far_as_their_factor(tmp_path: Path) -> None:
    model = make_model("dynamic rope", max_position_embeddings=48)
    name = save(model, tmp_path)
    assert make_native(name, max_model_len=None).load().max_model_len == 48
    assert make_native(name, max_model_len=96).load().max_model_len == 96
    with pytest.raises(ModelLoadError, match="max_model_len: 97 exceeds the 96 positions"):
        native_runner(name, max_model_len=97)


def test_proportional_frequencies_are_told_from_plain_ones() -> None:
    """What :mod:`test_families` compares for this type would differ without it."""
    plain = make_model("proportional rope", rope_parameters={"rope_type": "default", "rope_theta": 10.0})
    ours = make_model("proportional rope")
    assert "proportional rope" in CASES
    tokens = [all_logits(model, LONG[:40]).argmax(-1) for model in (plain, ours)]
    assert (tokens[0] != tokens[1]).sum() >= 5
