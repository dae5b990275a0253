"""The sampler with the kernels that it uses on GPUs, interpreted, beside what it does elsewhere."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from sampler_rig import KNOWN, VOCAB, Add, Rig, Row, make_logits

import trivet_kernels.sampling
from trivet.roles import Sampled

# Read when kernels are first imported, which the sampler leaves until it needs them.
os.environ.setdefault("TRITON_INTERPRET", "1")

MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.3},
    {"top_k": 7, "logprobs": 0},
    {"top_p": 0.6, "logprobs": 70},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"min_p": 0.2, "extra_args": {"after": True}},
    {"temperature": 0, "extra_args": {"before": True}},
    {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.6,
        "presence_penalty": -0.3,
        "prompt": [1, 4, 4],
        "output": [4, 9],
    },
    {"logit_bias": {5: 2.5, 7: -100.0}, "allowed_token_ids": list(range(0, 200, 3)), "words": [[6], [9, 12]]},
]


def run(dtype: torch.dtype, *, masked: bool) -> Sampled:
    delta = make_logits(1, seed=9)
    rig = Rig([Add("before", delta), Add("after", 2 * delta, keeps_argmax=True)])
    for slot, params in enumerate(MIXED):
        rig.add(slot, seed=31 + slot, **params)
    logits = make_logits(len(MIXED), seed=3).to(dtype)
    logits[4] = math.nan
    mask = None
    if masked:
        mask = torch.full((len(MIXED), -(-VOCAB // 32)), -1, dtype=torch.int32)
        mask[1, 1:], mask[6, :9] = 0, 0
    return rig.sample(logits, [Row(slot, slot) for slot in range(len(MIXED))], bitmask=mask)


@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, True), (torch.bfloat16, False)])
def test_tokens_faults_and_logprobs_are_the_same(
    dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    expected = run(dtype, masked=masked)
    monkeypatch.setattr(trivet_kernels.sampling, "_native", lambda: None)
    monkeypatch.setattr(trivet_kernels.sampling, "fused", lambda logits: True)
    sampled = run(dtype, masked=masked)
    assert [(error.slot, error.message) for error in sampled.errors] == [(4, "the logits are NaN")]
    assert sampled.errors == expected.errors
    assert sampled.accepted.values.tolist() == expected.accepted.values.tolist()
    assert (sampled.accepted.values < KNOWN).all()
    assert len(sampled.logprobs) == len(expected.logprobs) == 3
    for got, wanted in zip(sampled.logprobs, expected.logprobs, strict=True):
        assert got.row == wanted.row
        assert got.values.token_ids.tolist() == wanted.values.token_ids.tolist()
        assert got.values.ranks.tolist() == wanted.values.ranks.tolist()
        np.testing.assert_allclose(got.values.logprobs, wanted.values.logprobs, rtol=2e-6, atol=2e-6)
