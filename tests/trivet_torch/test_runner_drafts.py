"""Speculation in the runner: chains and trees of drafts change how many tokens a step gives, never which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from worker_kit import VOCAB, Driver, greedy, make_model, make_runner, save_model

from trivet.errors import RequestFault
from trivet.plan import Ragged
from trivet.roles import Drafter
from trivet.roles.drafter import DraftInputs, Drafts

PROMPTS = {0: [3 + (7 * i) % 90 for i in range(11)], 2: [5, 9, 40, 11], 5: [8]}
COUNT = 14


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, list[int]]]:
    """A saved model and what plain greedy makes of every prompt, a few tokens beyond what is compared."""
    model = make_model(request.param)
    name = save_model(model, tmp_path_factory.mktemp("model"))
    return name, {slot: greedy(model, prompt, COUNT + 8) for slot, prompt in PROMPTS.items()}


class Oracle(Drafter):
    """Knows the right continuation and spoils some of it; may hide it among wrong branches of a tree."""

    num_tokens = 5
    lookahead = 0

    def __init__(self, truth: dict[int, list[int]], *, tree: bool, seed: int = 0) -> None:
        self.truth, self.tree, self.rng = truth, tree, np.random.default_rng(seed)
        self.asked: list[list[int]] = []

    def propose(self, inputs: DraftInputs) -> Drafts:
        tokens, parents = [], []
        self.asked.append(inputs.k.tolist())
        for slot, k in zip(inputs.slots.tolist(), inputs.k.tolist(), strict=True):
            if k == 0:
                tokens.append([])
                parents.append([])
                continue
            begin = int(inputs.lengths[slot]) - len(PROMPTS[slot])
            assert inputs.tokens[slot, : inputs.lengths[slot]].tolist() == PROMPTS[slot] + self.truth[slot][:begin]
            right = self.truth[slot][begin : begin + k]
            ids, above = self._tree(right, k) if self.tree else self._chain(right)
            tokens.append(ids)
            parents.append(above)
        return Drafts(Ragged.from_rows(tokens), Ragged.from_rows(parents) if self.tree else None)

    def _chain(self, right: list[int]) -> tuple[list[int], list[int]]:
        keep = int(self.rng.integers(0, len(right) + 1))
        ids = right[:keep] + [(t + 1) % VOCAB for t in right[keep:]]
        return ids, list(range(-1, len(ids) - 1))

    def _tree(self, right: list[int], k: int) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        parents: list[int] = []
        node = -1
        for token in right:
            if len(ids) + 2 > k:
                break
            # A wrong sibling before the right one, or the other way round; sometimes the right one is missing.
            options = [(token + 1 + int(self.rng.integers(0, 9))) % VOCAB, token]
            if self.rng.random() < 0.5:
                options.reverse()
            if self.rng.random() < 0.15:
                options.remove(token)
            places = {}
            for option in options:
                places[option] = len(ids)
                ids.append(option)
                parents.append(node)
            node = places.get(token, len(ids) - 1)
        return ids, parents


def _run(driver: Driver, k: int) -> int:
    steps = 0
    while any(len(driver.outputs(slot)) < COUNT for slot in driver.requests):
        wanted = [k if len(driver.outputs(r.slot)) + k < COUNT + 6 else 0 for r in driver.requests.values()]
        driver.step(draft_k=np.array(wanted, np.int32))
        steps += 1
    return steps


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_drafts_give_the_tokens_of_plain_greedy(
    made: tuple[str, dict[int, list[int]]], tree: bool, block_size: int
) -> None:
    name, truth = made
    for seed in range(3):
        drafter = Oracle(truth, tree=tree, seed=seed)
        driver = make_runner(name, block_size, drafter=[drafter])
        for slot, prompt in PROMPTS.items():
            driver.add(slot, prompt)
        steps = _run(driver, 5)
        for slot in PROMPTS:
            assert driver.outputs(slot)[:COUNT] == truth[slot][:COUNT]
        assert steps < COUNT, "no draft was ever accepted"
        assert driver.info.draft_tokens == 5


def test_a_tree_path_is_moved_to_where_a_chain_would_be(made: tuple[str, dict[int, list[int]]]) -> None:
    """After the second branch was accepted, its keys must be at the positions that follow the known tokens."""
    name, truth = made
    driver = make_runner(name, 4)
    right = truth[0]
    driver.add(0, PROMPTS[0])
    driver.step()
    request = driver.requests[0]
    request.drafts = [(right[1] + 1) % VOCAB, right[1], (right[2] + 1) % VOCAB, right[2]]
    request.parents = [-1, -1, 1, 1]
    result = driver.step()
    assert result.accepted.row(0).tolist() == right[1:4]
    accepted = driver.runner._attention.kv(0)[0].flatten(0, 1)[_places(driver, 0)]

    plain = make_runner(name, 4)
    plain.add(0, PROMPTS[0])
    for _ in range(4):
        plain.step()
    expected = plain.runner._attention.kv(0)[0].flatten(0, 1)[_places(plain, 0)]
    torch.testing.assert_close(accepted, expected, atol=1e-5, rtol=0)


def _places(driver: Driver, slot: int) -> torch.Tensor:
    request = driver.requests[slot]
    group = next(g.index for g in driver.layout.groups if 0 in g.layers)
    positions = np.arange(request.computed)
    return torch.from_numpy(driver.runner._batch.locations(group, np.full(len(positions), slot), positions))


def test_parents_of_a_chain_need_no_tree(made: tuple[str, dict[int, list[int]]]) -> None:
    name, truth = made
    driver = make_runner(name, 4)
    driver.add(0, PROMPTS[0])
    driver.step()
    driver.requests[0].drafts, driver.requests[0].parents = truth[0][1:4], [-1, 0, 1]
    driver.step()
    assert driver.outputs(0) == truth[0][:5]
    assert driver.context.roles["sampler"].seen[-1].draft_parents is None


def test_a_tree_in_one_row_leaves_a_chain_in_another_and_a_prefill_alone(
    made: tuple[str, dict[int, list[int]]],
) -> None:
    name, truth = made
    driver = make_runner(name, 4)
    driver.add(0, PROMPTS[0])
    driver.add(2, PROMPTS[2])
    driver.step()
    driver.add(5, PROMPTS[5])
    wrong = (truth[0][1] + 3) % VOCAB
    driver.requests[0].drafts, driver.requests[0].parents = [wrong, truth[0][1], truth[0][2]], [-1, -1, 1]
    driver.requests[2].drafts = truth[2][1:3]
    driver.step()
    driver.step()
    assert {slot: driver.outputs(slot) for slot in PROMPTS} == {
        0: truth[0][:5],
        2: truth[2][:5],
        5: truth[5][:2],
    }


def test_children_before_parents_are_an_error(made: tuple[str, dict[int, list[int]]]) -> None:
    driver = make_runner(made[0], 4)
    driver.add(0, PROMPTS[0])
    driver.step()
    driver.requests[0].drafts, driver.requests[0].parents = [4, 5], [1, -1]
    with pytest.raises(ValueError, match="parent must come before"):
        driver.step()


def test_drafts_without_ids_are_an_error(made: tuple[str, dict[int, list[int]]]) -> None:
    driver = make_runner(made[0], 4)
    driver.add(0, PROMPTS[0])
    driver.step()
    driver.requests[0].drafts = [4, 5]
    with pytest.raises(ValueError, match="without as many ids"):
        driver.step(draft_ids=None)


def test_rows_that_drew_nothing_get_no_drafts(made: tuple[str, dict[int, list[int]]]) -> None:
    name, truth = made
    drafter = Oracle(truth, tree=False)
    driver = make_runner(name, 4, drafter=[drafter])
    driver.add(0, PROMPTS[0])
    driver.add(2, PROMPTS[2])
    result = driver.step({0: 5, 2: 4}, draft_k=np.array([5, 5], np.int32))
    assert drafter.asked == [[0, 5]]
    assert result.next_drafts is not None
    assert result.next_drafts.lengths.tolist()[0] == 0


@pytest.mark.parametrize(("proposal", "message"), [([1, 2, 3], "asked for"), ([VOCAB], "outside 0")])
def test_impossible_proposals_are_an_error(
    made: tuple[str, dict[int, list[int]]], proposal: list[int], message: str
) -> None:
    class Wild(Drafter):
        def propose(self, inputs: DraftInputs) -> Drafts:
            return Drafts(Ragged.from_rows([proposal]))

    driver = make_runner(made[0], 4, drafter=[Wild()])
    driver.add(0, PROMPTS[0])
    with pytest.raises(ValueError, match=message):
        driver.step(draft_k=np.array([2], np.int32))


def test_a_drafter_that_faults_one_request_costs_nobody_a_token(made: tuple[str, dict[int, list[int]]]) -> None:
    class Faulty(Drafter):
        def propose(self, inputs: DraftInputs) -> Drafts:
            raise RequestFault({"two": "cannot draft for it"})

    name, truth = made
    driver = make_runner(name, 4, drafter=[Faulty()])
    driver.add(0, PROMPTS[0], name="one")
    driver.add(2, PROMPTS[2], name="two")
    result = driver.step(draft_k=np.array([2, 2], np.int32))
    assert not result.undone
    assert [(e.slot, e.message) for e in result.errors] == [(2, "cannot draft for it")]
    assert driver.outputs(0) == truth[0][:1]


def test_a_drafter_sees_hidden_states_if_it_wants_them(made: tuple[str, dict[int, list[int]]]) -> None:
    shapes: list[Any] = []

    class Curious(Drafter):
        wants_hidden = True

        def propose(self, inputs: DraftInputs) -> Drafts:
            assert inputs.output is not None
            shapes.append(tuple(inputs.output.hidden.shape))
            return Drafts(Ragged.empty(len(inputs.slots)))

    driver = make_runner(made[0], 4, drafter=[Curious()])
    driver.add(0, PROMPTS[0])
    driver.step(draft_k=np.array([2], np.int32))
    assert shapes == [(len(PROMPTS[0]), 32)]


@pytest.mark.parametrize(("writes", "reserved", "asked"), [(3, 3, 3), (3, 1, 1), (3, 0, 0), (0, 0, 3)])
def test_a_drafter_with_a_cache_is_asked_for_what_has_a_place(
    made: tuple[str, dict[int, list[int]]], writes: int, reserved: int, asked: int
) -> None:
    name, truth = made
    drafter = Oracle(truth, tree=False)
    drafter.lookahead = writes
    driver = make_runner(name, 4, drafter=[drafter])
    driver.add(0, PROMPTS[0])
    driver.step(draft_k=np.array([3], np.int32), lookahead=np.array([reserved], np.int32))
    assert drafter.asked == ([[asked]] if asked else [])
