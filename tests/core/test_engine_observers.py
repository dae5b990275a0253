"""What plugins on the engine's side can find out while it runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from engine_kit import drain, engine, expect, greedy, prompts

from trivet import RequestError
from trivet.hookspecs import hookimpl
from trivet.state import PromptRange


class Observer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.reasons: defaultdict[str, set[str]] = defaultdict(set)
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.most = 0

    @hookimpl
    def trivet_engine_started(self, context: Any) -> None:
        self.context = context

    @hookimpl
    def trivet_step_finished(self, event: Any) -> None:
        self.most = max(self.most, len(self.context.requests))
        for request_id in self.context.requests:
            wait = self.context.explain(request_id)
            self.reasons[request_id].add("none" if wait is None else wait.kind)
        for row, request in enumerate(event.events.requests):
            self.tokens[request.request_id] += event.events.tokens.row(row).tolist()


@pytest.mark.parametrize("stop", [False, True])
def test_an_observer_knows_every_request_its_reasons_and_what_was_committed(stop: bool) -> None:
    observer = Observer()
    work = {str(i): (prompt, 10) for i, prompt in enumerate(prompts(12))}
    with engine(observer) as e:
        for request_id, (prompt, count) in work.items():
            e.add_request(request_id, prompt, greedy(count))
        if stop:
            e.step()
            e.abort("11")
        done = drain(e)
        assert observer.context.explain("0") is None
        assert observer.context.layout.groups[0].block_size == 4
        assert observer.context.info.model.architecture == "fake"
        if not stop:
            expect(done, work)
        assert {i: done[i].output_ids for i in work if done[i].output_ids} == dict(observer.tokens)
        assert observer.most == len(work)
        assert {"none", "turn"} <= set().union(*observer.reasons.values())


def test_ranges_of_a_prompt_are_in_the_plans_that_compute_them() -> None:
    prompt = [7 * i % 64 for i in range(52)]
    ranges = (PromptRange(3, 9, "cat", b"c"), PromptRange(20, 30, "dog", b"d", offset=7))
    scheduler = {"use": "continuous", "max_num_batched_tokens": 7, "max_num_seqs": 8}
    cache = {"use": "paged", "block_size": 4, "num_blocks": 30, "prefix_caching": False}
    with engine(scheduler=scheduler, cache=cache) as e:
        rows: defaultdict[int, list[tuple[str, int, int]]] = defaultdict(list)
        steps = []
        commit = e.hooks.commit

        def look(plan: Any, result: Any) -> Any:
            epochs = dict(zip(plan.slots.tolist(), plan.epochs.tolist(), strict=True))
            for one in plan.multimodal:
                rows[epochs[one.slot]] += [(one.item, one.start + i, one.offset + i) for i in range(one.length)]
            steps.append(len(plan.multimodal))
            return commit(plan, result)

        e.hooks.commit = look
        for name in "ab":
            e.add_request(name, prompt, greedy(20), ranges=ranges)
        e.add_request("plain", prompt, greedy(20))
        done = drain(e)
        expect(done, dict.fromkeys(("a", "b", "plain"), (prompt, 20)))
        wanted = [(r.item, r.start + i, r.offset + i) for r in ranges for i in range(r.length)]
        assert len(rows) >= 2
        assert all(found == wanted[: len(found)] for found in rows.values()), "chunk by chunk, in order, each once"
        assert sum(found == wanted for found in rows.values()) >= 2
        assert max(steps) > 0
        assert steps[-1] == 0, "decoding names none"


@pytest.mark.parametrize(
    "bad", [PromptRange(-1, 2, "x", b""), PromptRange(2, 0, "x", b""), PromptRange(8, 4, "x", b"")]
)
def test_a_range_outside_the_prompt_is_refused(bad: PromptRange) -> None:
    with engine() as e:
        with pytest.raises(RequestError, match="ranges: .*'x'.*10 tokens"):
            e.add_request("a", list(range(10)), greedy(2), ranges=[bad])
        assert not e.has_work


@pytest.mark.parametrize("given", [{"adapter": "a"}, {"ranges": [PromptRange(0, 1, "x", b"")]}])
def test_what_the_model_does_not_take_is_refused_before_it_can_disturb_others(given: Any) -> None:
    with engine() as e:
        e.parts.info = replace(e.parts.info, model=replace(e.parts.info.model, takes=()))
        with pytest.raises(RequestError, match="the selected model does not take it") as refused:
            e.add_request("a", [1, 2, 3], greedy(2), **given)
        assert refused.value.param == next(iter(given))
        assert not e.has_work
