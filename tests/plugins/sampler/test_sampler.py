"""The sampler through its role: order of the operations, seeds, faults, drafts, logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivet.plan import NewRequest, Ragged, Task
from trivet.roles import LogitsProcessor, Sampled, SampleRows
from trivet_kernels.reference.noise import gumbel_noise
from trivet_sampler.plugin import trivet_providers
from trivet_sampler.sampler import TorchSampler
from trivet_schemas.sampling import ENGINE_FIELDS, PoolingParams, SamplingParams

VOCAB, KNOWN = 330, 300  # the model has more rows than the tokenizer has ids


@dataclass
class Row:
    """A sampling row: its slot, where its output stands, and drafts to verify."""

    slot: int
    position: int = 0
    drafts: Sequence[int] = ()
    parents: Sequence[int] | None = None


@dataclass
class Rig:
    """A bound sampler with requests in slots."""

    processors: Sequence[LogitsProcessor] = ()
    sampler: TorchSampler = field(default_factory=TorchSampler)

    def __post_init__(self) -> None:
        self.sampler.bind(VOCAB, KNOWN, 16, self.processors)

    def add(self, slot: int, *, seed: int = 0, epoch: int = 1, stop_ids: Sequence[int] = (), **params: Any) -> Rig:
        self.sampler.add(
            NewRequest(
                request_id=f"r{slot}",
                slot=slot,
                epoch=epoch,
                token_ids=np.array([1], np.int32),
                num_prompt=1,
                num_computed=0,
                blocks=[],
                params=SamplingParams(**params),
                seed=seed,
                stop_ids=np.array(stop_ids, np.int32),
            )
        )
        return self

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        *,
        prompt_rows: Sequence[tuple[int, int, int, int, int]] = (),
        tokens: Any = None,
        bitmask: Tensor | None = None,
    ) -> Sampled:
        return self.sampler.sample(logits, sample_rows(rows, len(logits), prompt_rows, tokens, bitmask))

    def draw(self, logits: Tensor, rows: Sequence[Row], **given: Any) -> list[list[int]]:
        sampled = self.sample(logits, rows, **given)
        assert not sampled.errors
        return [sampled.accepted.row(i).tolist() for i in range(len(rows))]


def sample_rows(
    rows: Sequence[Row],
    count: int,
    prompt_rows: Sequence[tuple[int, int, int, int, int]] = (),
    tokens: Any = None,
    bitmask: Tensor | None = None,
) -> SampleRows:
    positions, slots, parents, trees = [], [], [], False
    for row in rows:
        trees |= row.parents is not None
        chain = list(range(-1, len(row.drafts) - 1)) if row.parents is None else list(row.parents)
        depth = [0]
        for parent in chain:
            depth.append(depth[1 + parent] + 1)
        positions += [row.position + d for d in depth]
        slots += [row.slot] * len(depth)
        parents.append(chain)
    for slot, _, _, _, number in prompt_rows:
        positions += [0] * number
        slots += [slot] * number
    assert len(positions) == count
    return SampleRows(
        plan_rows=np.arange(len(rows), dtype=np.int32),
        slots=np.array([row.slot for row in rows], np.int32),
        starts=np.concatenate([[0], np.cumsum([1 + len(row.drafts) for row in rows])]).astype(np.int32),
        positions=np.array(positions, np.int32),
        row_slots=np.array(slots, np.int32),
        drafts=Ragged.from_rows([list(row.drafts) for row in rows]),
        draft_parents=Ragged.from_rows(parents) if trees else None,
        prompt_rows=list(prompt_rows),
        bitmask=bitmask,
        tokens=tokens,
    )


def make_logits(rows: int, *, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def bits(allowed: Sequence[int] | None) -> list[int]:
    """Words of a mask; None: everything is allowed."""
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    if allowed is None:
        words[:] = 0xFFFFFFFF
    for token in allowed or ():
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32).tolist()


class Add(LogitsProcessor):
    """Adds numbers to the logits of requests whose ``extra_args`` name it."""

    def __init__(self, name: str, delta: Tensor | float, *, keeps_argmax: bool = False) -> None:
        self.name, self.delta, self.slots = name, delta, set[int]()
        self.keeps_argmax = keeps_argmax  # type: ignore[misc]
        self.seen: list[list[int]] = []

    def add(self, request: NewRequest) -> bool:
        if self.name in (request.params.extra_args or {}):
            self.slots.add(request.slot)
        return request.slot in self.slots

    def remove(self, slot: int) -> None:
        self.slots.remove(slot)

    def apply(self, logits: Tensor, rows: SampleRows, selected: Tensor) -> Tensor:
        self.seen.append(selected.tolist())
        assert logits.dtype == torch.float32
        logits[selected] += self.delta
        return logits


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
    assert processor.seen == [[0, 1, 2, 5]]
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


# ---------------------------------------------------------------- drafts


def test_a_chain_is_accepted_as_far_as_the_run_without_drafts_goes() -> None:
    logits = make_logits(5)
    rig = Rig().add(0, seed=8, temperature=1.2)
    own = [rig.draw(logits[[i]].clone(), [Row(0, 3 + i)])[0][0] for i in range(5)]
    for right in range(5):
        drafts = own[:right] + [(own[i] + 1) % KNOWN for i in range(right, 4)]
        sampled = rig.sample(logits.clone(), [Row(0, 3, drafts)])
        assert sampled.accepted.row(0).tolist() == own[: right + 1]
        assert sampled.path is None


def test_a_tree_is_walked_along_what_is_drawn() -> None:
    #        last known
    #       /    |     \
    #      0     1      4
    #            |\      \
    #            2 3      5
    parents = [-1, -1, 1, 1, -1, 4]
    logits = make_logits(7, seed=2)
    rig = Rig().add(0, seed=1, temperature=0.9)

    def token(row: int, depth: int) -> int:
        return rig.draw(logits[[row]].clone(), [Row(0, 6 + depth)])[0][0]

    first = token(0, 0)
    after_one = token(1 + 1, 1)
    others = [t for t in range(10, 20) if t not in (first, after_one)]
    drafts = [others[0], first, others[1], after_one, others[2], others[3]]
    sampled = rig.sample(logits.clone(), [Row(0, 6, drafts, parents)])
    assert sampled.accepted.row(0).tolist() == [first, after_one, token(1 + 3, 2)]
    assert sampled.path is not None
    assert sampled.path.row(0).tolist() == [1, 3]
    nothing = rig.sample(logits.clone(), [Row(0, 6, [others[0]] * 6, parents)])
    assert nothing.accepted.row(0).tolist() == [first]
    assert nothing.path is not None
    assert len(nothing.path.row(0)) == 0


def test_drafts_of_some_rows_leave_the_others_alone() -> None:
    logits = make_logits(6)
    rig = Rig().add(0, seed=1).add(1, seed=2).add(2, temperature=0)
    alone = [rig.draw(logits[[i]].clone(), [Row(slot, 4)])[0] for i, slot in ((0, 0), (3, 1), (4, 2))]
    second = rig.draw(logits[[1]].clone(), [Row(0, 5)])[0]
    rows = [Row(0, 4, [alone[0][0], 5]), Row(1, 4), Row(2, 4, [(alone[2][0] + 1) % KNOWN])]
    sampled = rig.sample(logits.clone(), rows)
    got = [sampled.accepted.row(i).tolist() for i in range(3)]
    assert got[0][:2] == alone[0] + second
    assert got[1:] == alone[1:]


# ---------------------------------------------------------------- logprobs


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
    monkeypatch.setattr("trivet_sampler._logprobs._BLOCK", 2 * VOCAB)
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


# ---------------------------------------------------------------- the role


def test_parameters_without_effect_are_refused_and_the_others_are_not() -> None:
    supported = TorchSampler.fields | ENGINE_FIELDS
    offered = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1, "min_tokens": 2}
    assert SamplingParams(logprobs=1, prompt_logprobs=0, **offered).unsupported(supported) == []
    later = {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 2.0, "logit_bias": {1: 1.0}}
    later |= {"allowed_token_ids": [1], "bad_words": ["x"]}
    assert SamplingParams(**later).unsupported(supported) == list(later)


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
