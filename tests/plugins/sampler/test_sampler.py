"""The sampler through its role: order of the operations, seeds, masks, processors, faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_rig import KNOWN, VOCAB, Add, Rig, Row, make_logits
from torch import Tensor

from trivet.plan import NewRequest, Task
from trivet.roles import SampleRows
from trivet_kernels.reference.noise import gumbel_noise
from trivet_sampler.plugin import trivet_providers
from trivet_sampler.sampler import TorchSampler
from trivet_schemas.sampling import ENGINE_FIELDS, PoolingParams, SamplingParams


def bits(allowed: Sequence[int] | None) -> list[int]:
    """Words of a mask; None: everything is allowed."""
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    if allowed is None:
        words[:] = 0xFFFFFFFF
    for token in allowed or ():
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32).tolist()


def slow_draw(row: Tensor, params: SamplingParams, seed: int, position: int, *, before: Any = 0, after: Any = 0) -> int:
    """One row in float64, in the documented order; ``before`` and ``after`` the temperature something is added."""
    values = row[:KNOWN].float().double() + before
    if params.temperature == 0:
        return int(values.argmax())
    values = values / np.float32(params.temperature) + after
    order = torch.argsort(-values, stable=True)
    order = order[values[order] > -math.inf]
    if params.min_p > 0:
        order = order[values[order] >= values.max() + math.log(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        probabilities = values[order].softmax(0)
        order = order[(probabilities.cumsum(0) - probabilities) < params.top_p]
    ids = order.sort().values
    noise = gumbel_noise(torch.full_like(ids, seed), torch.full_like(ids, position), ids)
    return int(ids[(values[ids] + noise).argmax()])


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.0001},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.000001},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_equals_the_slow_reference_in_every_order(dtype: torch.dtype) -> None:
    logits = make_logits(len(MIXED)).to(dtype)
    rig = Rig()
    for slot, params in enumerate(MIXED):
        rig.add(slot, seed=100 + slot, **params)
    expected = [
        slow_draw(logits[i], SamplingParams(**params), 100 + i, 2 * i)
        if params.get("temperature") != 0.000001
        else int(logits[i, :KNOWN].float().argmax())
        for i, params in enumerate(MIXED)
    ]
    for order in (range(len(MIXED)), range(len(MIXED) - 1, -1, -1), [5], [0, 4, 9], [10, 2, 2 + 4]):
        index = list(order)
        drawn = rig.draw(logits[index].clone(), [Row(i, 2 * i) for i in index])
        assert drawn == [[expected[i]] for i in index]


def test_best_token_survives_any_cut() -> None:
    """A top_p next to nothing, min_p 1 and top_k 1 are greedy, with equal logits too."""
    logits = make_logits(4, scale=1.0).round()
    greedy = [[int(row[:KNOWN].argmax())] for row in logits]
    for params in ({"top_p": 0.0001}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 0}):
        for seed in range(5):
            rig = Rig()
            for slot in range(4):
                rig.add(slot, seed=seed, **params)
            assert rig.draw(logits.clone(), [Row(slot, seed) for slot in range(4)]) == greedy


def test_greedy_rows_draw_alike_alone_and_beside_others_that_come_and_go() -> None:
    logits = make_logits(4, scale=1.0).round()
    rig = Rig()
    for slot in range(3):
        rig.add(slot, temperature=0)
    rows = [Row(slot, 5) for slot in range(3)]
    greedy = [[int(row[:KNOWN].argmax())] for row in logits[:3]]
    assert rig.draw(logits[:3], rows) == greedy
    for other in ({"temperature": 1.5}, {"temperature": 0, "logprobs": 2}, {"temperature": 0, "logit_bias": {7: 50.0}}):
        rig.add(3, **other)
        together = rig.sample(logits, [*rows, Row(3, 0)])
        assert [together.accepted.row(i).tolist() for i in range(3)] == greedy
        assert bool(together.logprobs) == ("logprobs" in other)
        assert "logit_bias" not in other or together.accepted.row(3).tolist() == [7]
        assert rig.draw(logits[:3], rows) == greedy
        rig.sampler.remove(3)
        assert rig.draw(logits[:3], rows) == greedy


def test_padding_rows_of_the_head_are_never_drawn() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, KNOWN:] = 30.0
    rig = Rig().add(0, temperature=2.0, logprobs=3).add(1, temperature=0, logprobs=3)
    for position in range(300):
        sampled = rig.sample(logits.repeat(2, 1), [Row(0, position), Row(1, position)])
        assert (sampled.accepted.values < KNOWN).all()
        assert all((entry.values.token_ids < KNOWN).all() for entry in sampled.logprobs)


def test_draws_follow_the_probabilities_of_what_the_cuts_left() -> None:
    logits = make_logits(1, scale=1.0)
    params = {"temperature": 1.5, "top_k": 12, "top_p": 0.9}
    count = 3000
    rig = Rig()
    rows = []
    for slot in range(10):
        rig.add(slot, seed=1000 + slot, **params)
    for position in range(count // 10):
        rows += [rig.sample(logits.repeat(10, 1), [Row(slot, position) for slot in range(10)]).accepted.values]
    order = logits[0, :KNOWN].argsort(descending=True)[:12]
    weights = (logits[0, order].double() / 1.5).softmax(0)
    weights = weights[: int(((weights.cumsum(0) - weights) < 0.9).sum())]
    expected = (weights / weights.sum() * count).numpy()
    observed = np.bincount(np.concatenate(rows), minlength=KNOWN)
    assert observed.sum() == observed[order[: len(weights)]].sum() == count
    chi_square = ((observed[order[: len(weights)]] - expected) ** 2 / expected).sum()
    assert chi_square < 27.7  # 1 % for 13 degrees of freedom, and there are fewer


def test_a_seed_gives_the_same_tokens_alone_and_in_company() -> None:
    logits = make_logits(40, seed=1)
    alone = [Rig().add(3, seed=11, temperature=1.3).draw(logits[[i]].clone(), [Row(3, i)])[0] for i in range(40)]
    for partner in ({"temperature": 2.0}, {"temperature": 0}, {"top_k": 2}):
        for first in (True, False):
            rig = Rig().add(0, seed=11, temperature=1.3).add(1, seed=4711, **partner)
            rows = [Row(0, 0), Row(1, 9)]
            for i in range(40):
                rows[0].position = i
                pair = rows if first else rows[::-1]
                drawn = rig.draw(logits[[i, i]].clone(), pair)
                assert drawn[0 if first else 1] == alone[i]


def test_other_seeds_and_positions_give_other_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    drawn = {
        (seed, position): Rig().add(0, seed=seed).draw(logits.clone(), [Row(0, position)])[0][0]
        for seed in (0, 1, -1, 2**63 - 1, -(2**63))
        for position in range(6)
    }
    assert len(set(drawn.values())) > 20


def test_a_request_that_returns_to_a_slot_draws_on() -> None:
    logits = make_logits(1)
    rig = Rig().add(2, seed=5, epoch=1)
    before = rig.draw(logits.clone(), [Row(2, 7)])
    rig.sampler.remove(2)
    rig.add(2, seed=6, epoch=2, temperature=0)
    assert rig.draw(logits.clone(), [Row(2, 7)]) == [[int(logits[0, :KNOWN].argmax())]]
    rig.sampler.remove(2)
    rig.add(2, seed=5, epoch=3)
    assert rig.draw(logits.clone(), [Row(2, 7)]) == before


# ---------------------------------------------------------------- masks and processors


def test_bitmask_rows_allow_only_their_tokens() -> None:
    logits = make_logits(3)
    rig = Rig().add(0, temperature=0).add(1, seed=3).add(2, seed=3, temperature=0)
    mask = torch.tensor([bits([7, 299, 310]), bits([11]), bits(None)], dtype=torch.int32)
    drawn = rig.draw(logits.clone(), [Row(0), Row(1), Row(2)], bitmask=mask)
    best = 7 if logits[0, 7] > logits[0, 299] else 299
    assert drawn == [[best], [11], [int(logits[2, :KNOWN].argmax())]]


def test_min_tokens_keeps_every_stop_token_away() -> None:
    """The model wants each of its ends of sequence in turn."""
    stops = [3, 17, 250]
    for params in ({"temperature": 0}, {"temperature": 1.0}):
        rig = Rig().add(0, stop_ids=stops, min_tokens=8, **params).add(1, stop_ids=stops, **params)
        for position in range(12):
            logits = make_logits(2, seed=position)
            logits[:, stops[position % 3]] = 1000.0
            (early,), (free,) = rig.draw(logits, [Row(0, position), Row(1, position)])
            assert (early in stops) == (position >= 8)
            assert free == stops[position % 3]


def test_processors_run_in_their_order_around_the_temperature() -> None:
    g = torch.Generator().manual_seed(3)
    before, after = torch.randn(VOCAB, generator=g), torch.randn(VOCAB, generator=g) * 0.5
    changing, keeping = Add("changing", before), Add("keeping", after, keeps_argmax=True)
    rig = Rig([keeping, changing])
    cases: list[tuple[dict[str, Any], bool, bool]] = [
        ({"temperature": 0.7, "top_p": 0.9}, True, True),
        ({"temperature": 0.7, "top_p": 0.9}, False, False),
        ({"temperature": 1.4, "top_k": 20}, True, False),
        ({"temperature": 1.4, "min_p": 0.02}, False, True),
        ({"temperature": 0}, True, True),
    ]
    for slot, (params, first, second) in enumerate(cases):
        rig.add(slot, seed=slot, extra_args=_named(first, second), **params)
    for position in range(20):
        logits = make_logits(len(cases), seed=position)
        drawn = rig.draw(logits.clone(), [Row(slot, position) for slot in range(len(cases))])
        for slot, (params, first, second) in enumerate(cases):
            expected = slow_draw(
                logits[slot],
                SamplingParams(**params),
                slot,
                position,
                before=before[:KNOWN].double() if first else 0,
                after=after[:KNOWN].double() if second else 0,
            )
            assert drawn[slot] == [expected]
    assert changing.seen[0] == [0, 2, 4]
    assert keeping.seen[0] == [0, 3], "greedy rows skip a processor that keeps the most likely token"


def _named(first: bool, second: bool) -> dict[str, int]:
    return ({"changing": 1} if first else {}) | ({"keeping": 1} if second else {})


def test_processors_see_draft_rows_and_are_told_of_leaving_requests() -> None:
    processor = Add("changing", torch.zeros(VOCAB))
    rig = Rig([processor]).add(0, extra_args={"changing": 1}).add(1).add(2, extra_args={"changing": 1})
    rig.sample(make_logits(6), [Row(0, drafts=[1, 2]), Row(1, drafts=[3]), Row(2)])
    assert processor.seen == [[0, 0, 0, 2]]
    for slot in (0, 1, 2):
        rig.sampler.remove(slot)
    assert processor.slots == set()


def test_a_processor_that_returns_nothing_is_named() -> None:
    class Silent(Add):
        def apply(self, logits: Tensor, rows: SampleRows, selected: Tensor) -> Tensor:
            return None  # type: ignore[return-value]

    rig = Rig([Silent("changing", 0.0)]).add(0, extra_args={"changing": 1})
    with pytest.raises(TypeError, match="Silent: apply must return the logits"):
        rig.sample(make_logits(1), [Row(0)])


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}], ids=["greedy", "random"])
@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "all logits are -inf")]
)
def test_a_broken_row_ends_alone(params: dict[str, Any], value: float, message: str) -> None:
    rig = Rig()
    for slot in range(4):
        rig.add(slot, seed=slot, epoch=10 + slot, **params)
    logits = make_logits(4)
    rows = [Row(slot, 5) for slot in range(4)]
    clean = rig.draw(logits.clone(), rows)
    logits[2, slice(None) if value == -math.inf else 77] = value
    sampled = rig.sample(logits, rows)
    assert [sampled.accepted.row(i).tolist() for i in range(4)] == [clean[0], clean[1], [], clean[3]]
    (error,) = sampled.errors
    assert (error.slot, error.epoch) == (2, 12)
    assert message in error.message


def test_a_row_with_everything_masked_names_the_masks() -> None:
    remove = Add("changing", torch.full((VOCAB,), -math.inf))
    rig = Rig([remove])
    rig.add(0).add(1, stop_ids=[9], min_tokens=2).add(2, extra_args={"changing": 1}, temperature=0)
    mask = torch.tensor([bits([310]), bits([9]), bits(None)], dtype=torch.int32)
    sampled = rig.sample(make_logits(3), [Row(0), Row(1), Row(2)], bitmask=mask)
    assert sampled.accepted.lengths.tolist() == [0, 0, 0]
    assert [error.message.split("masked by ")[1] for error in sampled.errors] == [
        "structured_outputs",
        "structured_outputs and min_tokens",
        "logits processor Add",
    ]


def test_nan_behind_a_rejected_draft_is_nobodys_fault() -> None:
    logits = make_logits(4)
    rig = Rig().add(0, temperature=0).add(1, temperature=0)
    best = [int(row[:KNOWN].argmax()) for row in logits]
    logits[1] = math.nan
    wrong = (best[0] + 1) % KNOWN
    assert rig.draw(logits.clone(), [Row(0, drafts=[wrong]), Row(1, drafts=[best[2]])]) == [
        [best[0]],
        [best[2], best[3]],
    ]
    sampled = rig.sample(logits.clone(), [Row(0, drafts=[best[0]]), Row(1, drafts=[best[2]])])
    assert [e.slot for e in sampled.errors] == [0]
    assert [sampled.accepted.row(i).tolist() for i in range(2)] == [[], [best[2], best[3]]]


# ---------------------------------------------------------------- the role


def test_parameters_without_effect_are_refused_and_the_others_are_not() -> None:
    supported = TorchSampler.fields | ENGINE_FIELDS
    offered: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1, "min_tokens": 2}
    offered |= {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 2.0, "logit_bias": {1: 1.0}}
    offered |= {"allowed_token_ids": [1], "bad_words": ["x"], "logprob_token_ids": [3]}
    assert SamplingParams(logprobs=1, prompt_logprobs=0, **offered).unsupported(supported) == []
    assert SamplingParams(structured_outputs={"json_object": True}).unsupported(supported) == ["structured_outputs"]


def test_a_pooling_request_takes_a_slot_without_sampling() -> None:
    processor = Add("changing", 1.0)
    rig = Rig([processor])
    request = NewRequest("p", 0, 1, np.array([1], np.int32), 1, 0, [], PoolingParams(), Task.EMBED)
    rig.sampler.add(request)
    rig.sampler.remove(0)
    assert processor.seen == []


def test_the_descriptor_names_the_class() -> None:
    (provider,) = trivet_providers()
    assert (provider.role, provider.name) == ("sampler", "sampler")
    module, _, name = provider.factory.partition(":")
    assert (module, name) == (TorchSampler.__module__, TorchSampler.__name__)


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.2, 0.7, 1.0, 2.0]),
                "top_k": st.sampled_from([0, 1, 2, 50, 1000]),
                "top_p": st.sampled_from([1.0, 0.9, 0.33, 1e-3]),
                "min_p": st.sampled_from([0.0, 0.01, 0.5]),
            }
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 10**6),
    scale=st.sampled_from([0.3, 2.0, 10.0]),
)
def test_any_batch_equals_the_slow_reference(
    params: list[dict[str, Any]], seed: int, position: int, scale: float
) -> None:
    rig = Rig()
    for slot, given_params in enumerate(params):
        rig.add(slot, seed=seed, **given_params)
    logits = make_logits(len(params), seed=position, scale=scale)
    drawn = rig.draw(logits.clone(), [Row(slot, position) for slot in range(len(params))])
    assert drawn == [[slow_draw(logits[i], SamplingParams(**p), seed, position)] for i, p in enumerate(params)]


# ---------------------------------------------------------------- changes of logits


def test_a_row_with_nothing_left_names_what_masked_it() -> None:
    rig = Rig([Add("changing", torch.full((VOCAB,), -math.inf))])
    rig.add(0, allowed_token_ids=[4, 310], words=[[4]]).add(1, allowed_token_ids=[5], stop_ids=[5], min_tokens=3)
    rig.add(2, allowed_token_ids=[7]).add(3, logit_bias={4: 100.0}, extra_args={"changing": 1})
    mask = torch.tensor([bits(None), bits(None), bits([6]), bits(None)], dtype=torch.int32)
    sampled = rig.sample(make_logits(4), [Row(0), Row(1), Row(2), Row(3)], bitmask=mask)
    assert [error.message.split("masked by ")[1] for error in sampled.errors] == [
        "allowed_token_ids and bad_words",
        "allowed_token_ids and min_tokens",
        "structured_outputs and allowed_token_ids",
        "logits processor Add",
    ]


def test_penalties_that_overflow_end_their_request_and_are_named() -> None:
    rig = Rig().add(0, repetition_penalty=1e-38, prompt=[3, 8], temperature=0).add(1, temperature=0)
    logits = make_logits(2)
    logits[0, 3] = 30.0
    sampled = rig.sample(logits.clone(), [Row(0), Row(1)])
    (error,) = sampled.errors
    assert (error.slot, error.message) == (0, "the logits are infinite (after repetition_penalty)")
    assert sampled.accepted.row(1).tolist() == [int(logits[1, :KNOWN].argmax())]


def test_changes_do_not_touch_raw_logprobs_nor_the_models_logits() -> None:
    params: dict[str, Any] = {"logit_bias": {3: 100.0}, "repetition_penalty": 3.0, "logprobs": 2, "prompt": [8, 9]}
    for dtype in (torch.float32, torch.bfloat16):
        logits = make_logits(2).to(dtype)
        before = logits.clone()
        rig = Rig().add(0, **params).add(1, temperature=0, logprobs=0)
        sampled = rig.sample(logits, [Row(0), Row(1)])
        assert sampled.accepted.row(0).tolist() == [3]
        expected = before.double().log_softmax(1)
        values = sampled.logprobs[0].values
        assert values.token_ids[0, 0] == 3
        np.testing.assert_allclose(values.logprobs[0], expected[0, values.token_ids[0].tolist()], atol=1e-5)
        assert sampled.logprobs[1].values.token_ids.shape == (1, 1), "0: the chosen token's alone"
        assert torch.equal(logits, before)


def test_logprobs_of_tokens_asked_for_by_id() -> None:
    logits = make_logits(3)
    rig = Rig().add(0, temperature=0, logprob_token_ids=[7, 299, 329]).add(1, logprobs=3, logprob_token_ids=[5])
    rig.add(2)
    sampled = rig.sample(logits.clone(), [Row(0), Row(1), Row(2)])
    first, second = (entry.values for entry in sampled.logprobs)
    assert [entry.row for entry in sampled.logprobs] == [0, 1]
    assert first.token_ids[0, 1:].tolist() == [7, 299, 329]
    assert second.token_ids[0, 1:].tolist() == [*logits[1, :KNOWN].argsort(descending=True)[:3].tolist(), 5]
    for row, values in enumerate((first, second)):
        expected = logits[row].double().log_softmax(0)[values.token_ids[0].tolist()]
        np.testing.assert_allclose(values.logprobs[0], expected, rtol=1e-5, atol=1e-5)


def test_long_and_short_bad_words_of_requests_that_come_and_go() -> None:
    """A longer word than any before it changes how all are kept."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 3], logits[:, 4] = 2.0, 1.0
    rig = Rig().add(0, temperature=0, words=[[9, 3]], output=[9])
    assert rig.draw(logits[:1].clone(), [Row(0, 1)]) == [[4]]
    rig.add(1, temperature=0, words=[[9, 8, 7, 3], [4]], output=[9, 8, 7])
    assert rig.draw(logits.clone(), [Row(0, 1), Row(1, 3)]) == [[4], [0]]
    rig.append(0, 6)
    rig.append(1, 7)
    assert rig.draw(logits.clone(), [Row(0, 2), Row(1, 4)]) == [[3], [3]]
    rig.sampler.remove(1)
    rig.add(1, temperature=0)
    assert rig.draw(logits.clone(), [Row(0, 2), Row(1)]) == [[3], [3]]


def test_a_word_that_begins_in_the_prompt_is_not_in_the_output() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 2.0
    rig = Rig().add(0, temperature=0, words=[[9, 3]], prompt=[9])
    assert rig.draw(logits.clone(), [Row(0)]) == [[3]]


def test_a_seeded_and_a_penalised_request_do_not_disturb_each_other() -> None:
    first: dict[str, Any] = {"seed": 7, "top_k": 1}
    second: dict[str, Any] = {"repetition_penalty": 1.8, "temperature": 0, "prompt": [4, 4, 9], "output": [9]}
    logits = make_logits(2, seed=6)
    alone = [
        Rig().add(0, **first).draw(logits[:1].clone(), [Row(0)]),
        Rig().add(0, **second).draw(logits[1:].clone(), [Row(0, 1)]),
    ]
    rig = Rig().add(0, **first).add(1, **second)
    assert rig.draw(logits.clone(), [Row(0), Row(1, 1)]) == alone[0] + alone[1]
    assert rig.draw(logits.flip(0), [Row(1, 1), Row(0)]) == alone[1] + alone[0]


def test_only_rows_that_ask_for_changes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    import trivet_sampler._changes as changes

    copied: list[list[int]] = []
    float_rows = changes.float_rows

    def watch(logits: Tensor, rows: Any, *rest: Any) -> Tensor:
        copied.append(rows.tolist())
        return float_rows(logits, rows, *rest)

    monkeypatch.setattr(changes, "float_rows", watch)
    rig = Rig().add(0).add(1, top_p=0.5).add(2, presence_penalty=1.0).add(3, min_tokens=2, stop_ids=[4])
    logits = make_logits(5).bfloat16()
    rig.draw(logits.clone(), [Row(0), Row(1), Row(2, drafts=[5]), Row(3, 1)])
    rig.draw(logits.clone(), [Row(0), Row(1), Row(2, drafts=[5]), Row(3, 2)])
    rig.draw(logits[:2].clone(), [Row(0), Row(1)])
    assert copied == [[2, 3, 4], [2, 3]]
