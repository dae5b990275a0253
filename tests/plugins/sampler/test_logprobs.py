"""Logprobs of drawn tokens and of prompts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampler_rig import KNOWN, VOCAB, Add, Rig, Row, make_logits
from torch import Tensor


def raw_logprobs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_model(dtype: torch.dtype) -> None:
    logits = make_logits(5).to(dtype)
    change = Add("changing", torch.linspace(0, 5, VOCAB))
    rig = Rig([change]).add(0, temperature=0.5, top_k=3, logprobs=2).add(1, temperature=0, logprobs=0)
    rig.add(2, seed=4, logprobs=5, extra_args={"changing": 1}).add(3).add(4, logprobs=-1, temperature=0)
    before = logits.clone()
    sampled = rig.sample(logits.clone(), [Row(slot) for slot in range(5)])
    expected = raw_logprobs(before)
    assert [entry.row for entry in sampled.logprobs] == [0, 1, 2, 4]
    for entry, k in zip(sampled.logprobs, (2, 0, 5, KNOWN), strict=True):
        values = entry.values
        assert values.token_ids.shape == values.logprobs.shape == (1, 1 + k)
        (drawn,) = sampled.accepted.row(entry.row).tolist()
        order = torch.argsort(-before[entry.row, :KNOWN].double(), stable=True)
        assert values.token_ids[0].tolist() == [drawn, *order[:k].tolist()]
        close = expected[entry.row, torch.from_numpy(values.token_ids[0]).long()].float().numpy()
        np.testing.assert_allclose(values.logprobs[0], close, rtol=1e-5, atol=1e-5)
        assert values.ranks.tolist() == [1 + int((before[entry.row, :KNOWN] > before[entry.row, drawn]).sum())]
        assert values.token_ids.dtype == values.ranks.dtype == np.int32
        assert values.logprobs.dtype == np.float32


def test_logprobs_come_with_every_accepted_draft() -> None:
    logits = make_logits(3)
    best = [int(row[:KNOWN].argmax()) for row in logits]
    rig = Rig().add(0, temperature=0, logprobs=1)
    sampled = rig.sample(logits.clone(), [Row(0, drafts=[best[0], (best[1] + 1) % KNOWN])])
    (entry,) = sampled.logprobs
    assert entry.values.token_ids.tolist() == [[best[0]] * 2, [best[1]] * 2]
    expected = raw_logprobs(logits)
    np.testing.assert_allclose(entry.values.logprobs[:, 0], [expected[i, best[i]] for i in range(2)], atol=1e-5)
    assert entry.values.ranks.tolist() == [1, 1]


def test_prompt_logprobs_of_chunks_join_to_those_of_the_whole() -> None:
    prompt = [4, 8, 200, 8, 31, 77, 5]
    logits = make_logits(len(prompt), seed=5)
    tokens = np.zeros((16, 20), np.int32)
    tokens[6, : len(prompt)] = prompt
    rig = Rig().add(6, epoch=3, prompt_logprobs=2, temperature=0).add(1, temperature=0)
    whole = rig.sample(logits[:-1].clone(), [], prompt_rows=[(6, 3, 1, 0, 6)], tokens=tokens)
    assert not len(whole.accepted)
    (entry,) = whole.prompt_logprobs
    assert (entry.slot, entry.epoch, entry.start) == (6, 3, 1)
    assert entry.values.token_ids[:, 0].tolist() == prompt[1:]
    expected = raw_logprobs(logits)
    np.testing.assert_allclose(
        entry.values.logprobs[:, 0], [expected[i, prompt[i + 1]] for i in range(6)], rtol=1e-5, atol=1e-5
    )
    # The second chunk's step also draws, for this request and another one; sampled rows come first.
    first = rig.sample(logits[:4].clone(), [], prompt_rows=[(6, 3, 1, 0, 4)], tokens=tokens)
    step = torch.cat([logits[6:], make_logits(1), logits[4:6]])
    second = rig.sample(step, [Row(6), Row(1)], prompt_rows=[(6, 3, 5, 2, 2)], tokens=tokens)
    assert second.accepted.row(0).tolist() == [int(logits[6, :KNOWN].argmax())]
    joined = [first.prompt_logprobs[0], second.prompt_logprobs[0]]
    assert [part.start for part in joined] == [1, 5]
    for name in ("token_ids", "logprobs", "ranks"):
        parts = np.concatenate([getattr(part.values, name) for part in joined])
        np.testing.assert_array_equal(parts, getattr(entry.values, name))


def test_many_logprobs_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(9)
    tokens = np.tile(np.arange(20, dtype=np.int32), (16, 1))
    rig = Rig().add(0, prompt_logprobs=3)

    def compute() -> Any:
        return rig.sample(logits.clone(), [], prompt_rows=[(0, 1, 1, 0, 9)], tokens=tokens).prompt_logprobs[0].values

    whole = compute()
    monkeypatch.setattr("trivet_kernels.sampling._native", lambda: None)
    monkeypatch.setattr("trivet_kernels.sampling._VALUES", 2 * VOCAB)
    parts = compute()
    np.testing.assert_array_equal(whole.token_ids, parts.token_ids)
    np.testing.assert_allclose(whole.logprobs, parts.logprobs, rtol=1e-6)


def test_nan_in_the_prompts_logits_ends_that_request() -> None:
    tokens = np.ones((16, 8), np.int32)
    logits = make_logits(4)
    logits[2] = math.nan
    rig = Rig().add(0, epoch=5, prompt_logprobs=0, temperature=0).add(1, temperature=0)
    sampled = rig.sample(logits, [Row(0), Row(1)], prompt_rows=[(0, 5, 1, 2, 2)], tokens=tokens)
    assert [(e.slot, e.epoch) for e in sampled.errors] == [(0, 5)]
    assert "NaN logits for the prompt" in sampled.errors[0].message
    assert sampled.accepted.lengths.tolist() == [0, 1]
    assert not sampled.prompt_logprobs
