"""Every parameter, alone and together, against a reference that takes one row at a time in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Case, assert_follows, changed, draws, is_greedy, probabilities
from sampler_rig import KNOWN, VOCAB, Add, Rig, Row, make_logits
from torch import Tensor

import trivet_kernels.sampling
from trivet_kernels.sampling import DrawParams
from trivet_kernels.sampling import draw as draw_rows
from trivet_schemas.sampling import SamplingParams


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels of this machine, and torch's operations."""
    if request.param == "native":
        yield
    else:
        with patch.object(trivet_kernels.sampling, "_native", lambda: None):
            yield


def enter(rig: Rig, slot: int, case: Case) -> None:
    params = case.params.model_dump(exclude_unset=True)
    rig.add(
        slot,
        seed=case.seed,
        prompt=case.prompt,
        output=case.output,
        stop_ids=case.stop_ids,
        words=case.words,
        **params,
    )


def expected_tokens(case: Case, row: Row, logits: Tensor, masks: Any = None) -> list[set[int]]:
    """Each accepted token of a row, as a set of those it may be."""
    parents = row.parents if row.parents is not None else list(range(-1, len(row.drafts) - 1))
    found, node, path = [], -1, list[int]()
    while True:
        bits = None if masks is None else masks[1 + node]
        values = changed(case, logits[1 + node, :KNOWN].double().numpy(), path, bits)
        tokens = draws(case, values, row.position + len(path))
        found.append(tokens)
        children = [n for n in range(len(row.drafts)) if parents[n] == node and row.drafts[n] in tokens]
        if not children:
            return found
        node = children[0]
        path.append(row.drafts[node])


def check(cases: list[Case], rows: list[Row], logits: Tensor, rig: Rig | None = None) -> list[list[int]]:
    """A batch's tokens, which are the reference's."""
    rig = rig or Rig()
    for slot, case in enumerate(cases):
        enter(rig, slot, case)
    before = logits.clone()
    drawn = rig.draw(logits, rows)
    at = 0
    for row, tokens in zip(rows, drawn, strict=True):
        count = 1 + len(row.drafts)
        wanted = expected_tokens(cases[row.slot], row, before[at : at + count].float())
        assert len(tokens) == len(wanted) or len(max(wanted, key=len)) > 1
        for token, choices in zip(tokens, wanted, strict=False):
            assert token in choices, (row, cases[row.slot])
        at += count
    return drawn


LIMITS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"temperature": 1e-5},
    {"top_k": 1},
    {"top_k": KNOWN},
    {"top_k": KNOWN - 1, "temperature": 2.0},
    {"top_p": 1e-9},
    {"top_p": 0.999999},
    {"min_p": 1.0},
    {"min_p": 1e-9, "temperature": 2.0},
    {"logit_bias": {3: 100.0, 4: 99.0}},
    {"logit_bias": dict.fromkeys(range(KNOWN - 1), -100.0)},
    {"logit_bias": {VOCAB - 1: 100.0}},
    {"allowed_token_ids": [17]},
    {"allowed_token_ids": [17, 18, VOCAB - 1], "temperature": 2.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 1e6},
    {"repetition_penalty": 1.8, "temperature": 0.0},
    {"min_tokens": 9},
    {"frequency_penalty": 0.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "logit_bias": {1: -1.0}, "temperature": 1.4},
]


def limit_cases() -> list[Case]:
    rng = np.random.default_rng(2)
    found = []
    for seed, given_params in enumerate(LIMITS):
        prompt, output = rng.integers(0, 12, 9).tolist(), rng.integers(0, 12, 6).tolist()
        case = Case(SamplingParams(max_tokens=None, **given_params), prompt, output, seed, stop_ids=[1, 5])
        case.words = [[7], [*output[-2:], 3], [output[-1], 4], [9, 9, 2]] if seed % 2 else []
        found.append(case)
    return found


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_at_its_limits_in_any_order_and_alone(dtype: torch.dtype) -> None:
    cases = limit_cases()
    for scale in (0.5, 4.0):
        logits = make_logits(len(cases), seed=7, scale=scale).to(dtype)
        single = []
        for slot, case in enumerate(cases):
            single.append(check([case], [Row(0, 6)], logits[[slot]].clone())[0])
        for order in (list(range(16)), list(range(15, -1, -1)), list(range(len(cases) - 16, len(cases)))):
            rows = [Row(index, 6) for index in range(len(order))]
            assert check([cases[i] for i in order], rows, logits[order].clone()) == [single[i] for i in order]


@pytest.mark.usefixtures("kernels")
def test_all_but_one_masked() -> None:
    for params in ({"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.5}, {"repetition_penalty": 0.5}):
        logits = torch.full((1, VOCAB), -math.inf)
        logits[0, 299] = -40.0
        case = Case(SamplingParams(**params), [299, 3], [4])
        assert check([case], [Row(0, 1)], logits) == [[299]]


def test_penalties_count_the_prompt_only_for_repetition() -> None:
    """A prompt that repeats a token: the logits of the first step."""
    seen: list[Tensor] = []

    class Watch(Add):
        def apply(self, logits: Tensor, rows: Any, selected: Tensor) -> Tensor:
            seen.append(logits.clone())
            return logits

    rig = Rig([Watch("watch", 0.0)])
    common: dict[str, Any] = {"prompt": [5, 5, 5, 8], "extra_args": {"watch": 1}, "temperature": 0}
    rig.add(0, repetition_penalty=2.0, **common).add(1, frequency_penalty=1.0, presence_penalty=0.5, **common)
    logits = make_logits(2)
    rig.draw(logits.clone(), [Row(0), Row(1)])
    for token in range(VOCAB):
        value = float(logits[0, token])
        penalised = value / 2 if value > 0 else value * 2
        assert float(seen[0][0, token]) == (penalised if token in (5, 8) else value)
    assert torch.equal(seen[0][1], logits[1])
    rig.append(1, 5, 5, 9)
    rig.draw(logits.clone(), [Row(0), Row(1, 3)])
    difference = (logits[1] - seen[1][1]).double()
    assert difference[5] == pytest.approx(2.5, abs=1e-6)
    assert difference[9] == pytest.approx(1.5, abs=1e-6)
    assert difference.count_nonzero() == 2


def test_what_is_counted_survives_preemption_and_rejected_drafts() -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4, temperature=1.1)
    rng = np.random.default_rng(0)
    case, rig = Case(params, rng.integers(0, 40, 30).tolist(), seed=5), Rig()
    enter(rig, 3, case)
    for step in range(40):
        wrong = rng.integers(0, 40, int(rng.integers(0, 4))).tolist()
        logits = make_logits(1 + len(wrong), seed=step, scale=1.0)
        row = Row(3, len(case.output), wrong)
        drawn = rig.draw(logits.clone(), [row])[0]
        wanted = expected_tokens(case, row, logits)
        assert all(token in choices for token, choices in zip(drawn, wanted, strict=True))
        case.output += drawn
        rig.append(3, *drawn)
        if step % 7 == 6:
            rig.sampler.remove(3)
            rig.add(3, seed=9, repetition_penalty=1.9, prompt=[1, 2, 3])
            rig.sampler.remove(3)
            enter(rig, 3, case)


def test_processors_with_drafts_penalties_and_masks() -> None:
    g = torch.Generator().manual_seed(1)
    before, after = torch.randn(VOCAB, generator=g), torch.randn(VOCAB, generator=g) * 0.1
    rig = Rig([Add("changing", before), Add("keeping", after, keeps_argmax=True)])
    cases, rows = [], []
    for slot in range(8):
        extra = {"changing": 1} if slot % 2 else {}
        extra |= {"keeping": 1} if slot % 3 else {}
        params = SamplingParams(
            temperature=0.8 if slot % 4 else 0.0, frequency_penalty=0.5 * (slot % 3), extra_args=extra, top_p=0.95
        )
        case = Case(params, [slot, 2], [3, 3], slot)
        case.before = before[:KNOWN].double().numpy() if slot % 2 else 0.0
        case.after = after[:KNOWN].double().numpy() if slot % 3 else 0.0
        cases.append(case)
        rows.append(Row(slot, 2, [3, 4][: slot % 3]))
    logits = make_logits(sum(1 + len(row.drafts) for row in rows), seed=3)
    check(cases, rows, logits, rig)


tokens = st.integers(0, 9)
requests = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 50, 1000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.33, 1e-4]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    },
    optional={
        "presence_penalty": st.sampled_from([-2.0, 0.3, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.3, 2.0]),
        "repetition_penalty": st.sampled_from([0.01, 0.7, 1.2, 100.0]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=5),
        "allowed_token_ids": st.lists(st.integers(0, KNOWN - 1), min_size=20, max_size=60),
        "min_tokens": st.integers(0, 8),
    },
)
cases_of = st.builds(
    lambda params, prompt, output, seed, stops, words: Case(
        SamplingParams(max_tokens=None, **params), prompt, output, seed, stops, words
    ),
    requests,
    st.lists(tokens, min_size=1, max_size=12),
    st.lists(tokens, max_size=8),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(tokens, max_size=3, unique=True),
    st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(
    cases=st.lists(cases_of, min_size=1, max_size=6),
    scale=st.sampled_from([0.3, 2.0, 10.0]),
    seed=st.integers(0, 2**31),
    narrow=st.booleans(),
    data=st.data(),
)
def test_any_batch_with_any_drafts_equals_the_reference(
    cases: list[Case], scale: float, seed: int, narrow: bool, data: st.DataObject
) -> None:
    rows, pieces = [], []
    trees = data.draw(st.booleans())
    for slot, case in enumerate(cases):
        drafts = data.draw(st.lists(tokens, max_size=4))
        parents = [data.draw(st.integers(-1, n - 1)) for n in range(len(drafts))] if trees else None
        if parents is not None and len(set(zip(parents, drafts, strict=True))) < len(drafts):
            drafts, parents = [], []  # of equal siblings either may be taken
        row = Row(slot, len(case.output), drafts, parents)
        logits = make_logits(1 + len(drafts), seed=seed + slot, scale=scale)
        logits[:, :10] += 2 * scale  # drafts are drawn now and then
        rows.append(row)
        pieces.append(logits)
    whole = torch.cat(pieces)
    check(cases, rows, whole.bfloat16() if narrow else whole)


@pytest.mark.usefixtures("kernels")
def test_a_row_of_mixed_parameters_follows_its_probabilities() -> None:
    params = SamplingParams(
        temperature=1.3,
        top_p=0.97,
        top_k=200,
        min_p=0.002,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        logit_bias={9: 3.0, 2: -1.0},
        max_tokens=None,
    )
    case, logits = Case(params, [1, 2, 3, 4], [4, 4, 9, 11], 21), make_logits(1, scale=1.0)
    rig = Rig()
    enter(rig, 0, case)
    values = changed(case, logits[0, :KNOWN].double().numpy())
    drawn = []
    for start in range(0, 20_000, 2000):
        rows = [Row(0, position) for position in range(start, start + 2000)]
        drawn += [row[0] for row in rig.draw(logits.expand(2000, -1).contiguous(), rows)]
    assert_follows(np.array(drawn), probabilities(params, values))


@pytest.mark.parametrize(
    ("dtype", "given_params"),
    [
        (torch.float32, {"temperature": 1.0}),
        (torch.bfloat16, {"temperature": 1.7, "top_k": 60, "top_p": 0.95, "min_p": 0.001}),
    ],
)
def test_a_million_draws_follow_the_probabilities(dtype: torch.dtype, given_params: dict[str, Any]) -> None:
    count, size = 1_000_000, 150
    logits = make_logits(1, scale=2.0).to(dtype)
    params = SamplingParams(**given_params)
    columns = DrawParams(
        np.full(count, params.temperature, np.float32),
        np.full(count, params.top_k),
        np.full(count, params.top_p),
        np.full(count, params.min_p),
        np.arange(count) // 1000 - 300,
        np.arange(count) % 1000,
    )
    drawn, _ = draw_rows(logits, None, np.zeros(count, np.int64), size, columns)
    values = logits[0, :size].double().numpy() / float(np.float32(params.temperature))
    assert_follows(drawn, probabilities(params, values))


def test_the_reference_takes_greedy_parameters_for_what_they_are() -> None:
    assert [is_greedy(SamplingParams(**p)) for p in ({"top_k": 1}, {"min_p": 1.0}, {"temperature": 0}, {})] == [
        True,
        True,
        True,
        False,
    ]
