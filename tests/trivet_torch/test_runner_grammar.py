"""Structured output in the runner: compiling, masks for every row, advance, forced tokens, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from worker_kit import VOCAB, Driver, greedy, make_model, make_runner, save_model

from trivet.plan import Int32
from trivet.result import ConstraintState, StepResult
from trivet.roles import Grammar, Matcher

PROMPT = [5, 9, 40, 11]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    model = make_model("llama")
    return save_model(model, tmp_path_factory.mktemp("llama")), model


def constrained(**rule: Any) -> SimpleNamespace:
    """Parameters whose constraint is ``rule``, see :class:`Modular`."""
    return SimpleNamespace(structured_outputs=SimpleNamespace(**rule))


class Modular(Matcher):
    """Token ``i`` must leave the remainder ``i % 3`` when divided by 3; ends after ``length`` tokens."""

    def __init__(self, rule: Any, output_ids: Sequence[int]) -> None:
        self.rule, self.tokens = rule, []
        for token in output_ids:
            assert self.accept(token)

    def accept(self, token_id: int) -> bool:
        if self.is_terminated() or token_id % 3 != len(self.tokens) % 3:
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.tokens)
        del self.tokens[-count:]

    def fill_bitmask(self, out: Int32) -> None:
        assert not out.any(), "a mask starts empty"
        bits = np.zeros(len(out) * 32, np.uint8)
        bits[len(self.tokens) % 3 : VOCAB : 3] = 1
        out |= np.packbits(bits, bitorder="little").view(np.int32)

    def is_terminated(self) -> bool:
        return len(self.tokens) == getattr(self.rule, "length", -1)

    def forced(self) -> Sequence[int]:
        after = getattr(self.rule, "force_after", None)
        return [3, 4, 5] if after == len(self.tokens) else []


class ModularGrammar(Grammar):
    def __init__(self, gate: Callable[[], None] = lambda: None) -> None:
        self.gate = gate
        self.compiled: list[list[int]] = []

    def validate(self, params: Any) -> bool:
        return not hasattr(params.structured_outputs, "foreign")

    def compile(self, params: Any, output_ids: Sequence[int]) -> Matcher:
        self.gate()
        if hasattr(params.structured_outputs, "broken"):
            raise ValueError("keyword 'frobnicate' is not supported")
        self.compiled.append(list(output_ids))
        return Modular(params.structured_outputs, output_ids)


def events(driver: Driver, *, rows: bool = False) -> list[tuple[int, int, str]]:
    """Run plans without rows until one reports constraints."""
    for _ in range(200):
        result = driver.step({})
        if result.constraints:
            return [(c.slot, c.state, c.message) for c in result.constraints]
    raise AssertionError("no constraint was ever reported")


def obeys(tokens: list[int]) -> bool:
    return all(t % 3 == i % 3 for i, t in enumerate(tokens))


@torch.inference_mode()
def reference(model: Any, count: int) -> list[int]:
    """Greedy under the rule, computed plainly."""
    ids = PROMPT[:]
    for i in range(count):
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        allowed = torch.arange(VOCAB) % 3 == i % 3
        ids.append(int(logits.masked_fill(~allowed, float("-inf")).argmax()))
    return ids[len(PROMPT) :]


def test_a_grammar_compiles_beside_the_steps_of_others(llama: tuple[str, Any]) -> None:
    name, model = llama
    gate = threading.Event()
    driver = make_runner(name, 4, grammar=[ModularGrammar(lambda: gate.wait(30))])
    driver.add(0, PROMPT, params=constrained())
    driver.add(1, PROMPT)
    assert not driver.step({1: 4}).constraints
    for _ in range(3):
        assert not driver.step({1: 1}).constraints
    assert driver.outputs(1) == greedy(model, PROMPT, 4)
    gate.set()
    assert events(driver) == [(0, ConstraintState.READY, "")]
    for _ in range(5):
        driver.step()
    assert driver.outputs(0) == reference(model, 5)
    assert driver.outputs(1) == greedy(model, PROMPT, 9), "the neighbour must not notice"
    driver.runner.shutdown()


def test_the_sampler_hears_which_rows_a_mask_forbids_something(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0], 4, grammar=[ModularGrammar()])
    sampler = driver.runner._sampler  # type: ignore[attr-defined]
    driver.add(1, PROMPT)
    driver.step()
    assert sampler.seen[-1].bitmask is sampler.seen[-1].constrained is None
    driver.add(0, PROMPT, params=constrained())
    events(driver)
    driver.step()
    rows = sampler.seen[-1]
    assert sorted(zip(rows.row_slots.tolist(), rows.constrained.tolist(), strict=True)) == [(0, True), (1, False)]
    assert rows.constrained.tolist() == (rows.bitmask != -1).any(1).tolist()
    driver.runner.shutdown()


def test_a_plan_without_rows_waits_a_moment_for_the_compiler(llama: tuple[str, Any]) -> None:
    gate = threading.Event()
    driver = make_runner(llama[0], 4, grammar=[ModularGrammar(lambda: gate.wait(30))])
    driver.add(0, PROMPT, params=constrained())
    started = time.monotonic()
    assert not driver.step({}).constraints
    assert time.monotonic() - started >= 0.004
    gate.set()
    events(driver)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"broken": True}, "keyword 'frobnicate' is not supported"),
        ({"foreign": True}, "no grammar provider serves this structured output (ModularGrammar)"),
    ],
)
def test_a_constraint_that_cannot_be_compiled_fails_its_request(
    llama: tuple[str, Any], rule: dict[str, Any], message: str
) -> None:
    driver = make_runner(llama[0], 4, grammar=[ModularGrammar()])
    driver.add(0, PROMPT, params=constrained(**rule))
    assert events(driver) == [(0, ConstraintState.FAILED, message)]


def test_without_a_provider_a_constraint_fails(llama: tuple[str, Any]) -> None:
    driver = make_runner(llama[0], 4)
    driver.add(0, PROMPT, params=constrained())
    assert events(driver) == [
        (0, ConstraintState.FAILED, "no grammar provider serves this structured output (none is configured)")
    ]


def test_a_preempted_request_gets_its_matcher_back(llama: tuple[str, Any]) -> None:
    name, model = llama
    grammar = ModularGrammar()
    driver = make_runner(name, 4, grammar=[grammar])
    driver.add(0, PROMPT, params=constrained())
    events(driver)
    for _ in range(4):
        driver.step()
    old = driver.drop(0, preempt=True)
    driver.add(3, PROMPT, output=old.tokens[len(PROMPT) :], params=constrained())
    events(driver)
    for _ in range(3):
        driver.step()
    assert driver.outputs(3) == reference(model, 7)
    assert grammar.compiled == [[], reference(model, 4)]


def test_a_request_that_leaves_while_compiling_is_forgotten(llama: tuple[str, Any]) -> None:
    gate = threading.Event()
    driver = make_runner(llama[0], 4, grammar=[ModularGrammar(lambda: gate.wait(30))])
    driver.add(0, PROMPT, params=constrained())
    driver.step({})
    driver.drop(0)
    driver.add(0, PROMPT)
    driver.step()
    gate.set()
    assert all(not driver.step().constraints for _ in range(5))
    assert len(driver.outputs(0)) == 6


def test_a_provider_hears_that_nobody_waits_for_what_it_compiles(llama: tuple[str, Any]) -> None:
    gate, begun, cancelled = threading.Event(), threading.Event(), []

    class Stoppable(ModularGrammar):
        def cancel(self, params: Any) -> None:
            cancelled.append(params)
            gate.set()

    grammar = Stoppable(lambda: (begun.set(), gate.wait(30)))
    driver = make_runner(llama[0], 4, grammar=[grammar])
    params = constrained()
    driver.add(0, PROMPT, params=params)
    driver.step({})
    assert begun.wait(30)
    driver.drop(0)
    driver.step({})
    assert [one is params for one in cancelled] == [True]
    driver.add(1, PROMPT, params=constrained())
    result = driver.step({})
    while not result.constraints:
        result = driver.step({})
    assert [status.seconds > 0 for status in result.constraints] == [True]
    driver.drop(1)
    driver.step({})
    assert len(cancelled) == 1, "what has been compiled is not under way"


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_every_draft_row_has_its_own_mask(llama: tuple[str, Any], tree: bool) -> None:
    name, model = llama
    wanted = reference(model, 12)
    rng = np.random.default_rng(3)
    driver = make_runner(name, 4, grammar=[ModularGrammar()])
    driver.add(0, PROMPT, params=constrained())
    driver.add(1, PROMPT)
    events(driver)
    steps = 0
    while len(driver.outputs(0)) < 9:
        done = len(driver.outputs(0))
        if done:
            request = driver.requests[0]
            right = wanted[done : done + 3]
            if tree:  # a forbidden branch, an allowed wrong one, and the right one with its continuation
                wrong = [(right[0] + 1) % VOCAB, (right[0] + 3) % VOCAB if right[0] + 3 < VOCAB else right[0] - 3]
                request.drafts, request.parents = [*wrong, right[0], right[1]], [-1, -1, -1, 2]
            else:
                keep = int(rng.integers(0, 4))
                request.drafts = right[:keep] + [(t + 1) % VOCAB for t in right[keep:]]
        driver.step()
        steps += 1
    assert driver.outputs(0)[:9] == wanted[:9]
    assert steps < 9
    assert driver.outputs(1) == greedy(model, PROMPT, len(driver.outputs(1)))


def test_the_end_of_the_output_cuts_what_was_accepted_behind_it(llama: tuple[str, Any]) -> None:
    name, model = llama
    wanted = reference(model, 6)
    driver = make_runner(name, 4, grammar=[ModularGrammar()])
    driver.add(0, PROMPT, params=constrained(length=3))
    events(driver)
    driver.step()
    driver.requests[0].drafts = wanted[1:5]
    result = driver.step()
    assert driver.outputs(0) == wanted[:3]
    assert [(c.slot, c.state) for c in result.constraints] == [(0, ConstraintState.TERMINATED)]


def test_forced_tokens_are_known_at_once_and_sampling_goes_on_behind_them(llama: tuple[str, Any]) -> None:
    name, model = llama
    driver = make_runner(name, 4, grammar=[ModularGrammar()])
    driver.add(0, PROMPT, params=constrained(force_after=3))
    driver.add(1, PROMPT)
    events(driver)
    results: list[StepResult] = [driver.step() for _ in range(3)]
    assert [r.forced is None for r in results] == [True, True, False]
    assert results[2].forced is not None
    assert [results[2].forced.row(i).tolist() for i in range(2)] == [[3, 4, 5], []]
    after = driver.step()
    tokens = driver.outputs(0)
    assert tokens[3:6] == [3, 4, 5]
    assert obeys(tokens)
    assert len(tokens) == 7
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT + tokens[:6]])).logits[0, -1]
    allowed = torch.arange(VOCAB) % 3 == 0
    assert after.accepted.row(0).tolist() == [int(logits.masked_fill(~allowed, float("-inf")).argmax())]


def test_a_grammar_that_contradicts_its_mask_ends_the_request(llama: tuple[str, Any]) -> None:
    class Liar(Modular):
        def fill_bitmask(self, out: Int32) -> None:
            out[:] = -1

        def accept(self, token_id: int) -> bool:
            return False

    class LiarGrammar(ModularGrammar):
        def compile(self, params: Any, output_ids: Sequence[int]) -> Matcher:
            return Liar(params.structured_outputs, output_ids)

    name, model = llama
    driver = make_runner(name, 4, grammar=[LiarGrammar()])
    driver.add(0, PROMPT, params=constrained())
    driver.add(1, PROMPT)
    events(driver)
    result = driver.step()
    assert [e.slot for e in result.errors] == [0]
    assert "which its own mask allowed" in result.errors[0].message
    assert driver.outputs(0) == []
    assert driver.outputs(1) == greedy(model, PROMPT, 1)
