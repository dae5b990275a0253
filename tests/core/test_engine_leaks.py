"""An engine that lives long: nothing grows with the requests that came and went, and waiting costs nothing."""

from __future__ import annotations

from typing import Any

import machine_kit as kit
import numpy as np
import pytest
from engine_kit import check_free, config, drain, engine, expect, greedy, prompts

from trivet.context import Hold
from trivet.engine import Engine
from trivet.hookspecs import hookimpl
from trivet.policies import KeyFunction
from trivet.state import Request
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_continuous.queue import WaitingQueue

WORK = {str(i): (p, 12) for i, p in enumerate(prompts(12, seed=6))}


def test_adapters_that_nobody_uses_any_more_are_forgotten() -> None:
    sent: list[list[str]] = []
    scheduler = {"use": "continuous", "max_num_seqs": 3}
    with engine(kit, scheduler=scheduler, executor={"use": "held", "depth": 2}) as e:
        e.hooks.run, run = lambda plan: sent.append(plan.adapters) or run(plan), e.hooks.run
        for i in range(60):
            e.add_request(str(i), [1, 2, 3], greedy(1 + i % 5), adapter=f"adapter{i % 20}" if i % 4 else None)
        done = drain(e)
        for i in range(60):
            adapter = f"adapter{i % 20}" if i % 4 else None
            assert done[str(i)].output_ids == reference_tokens([1, 2, 3], 1 + i % 5, adapter=adapter)
        assert max(map(len, sent)) == 3, "no more than can run at once"
        sent.clear()
        e.add_request("base", [1], greedy(3))
        drain(e)
        assert sent == [[]] * len(sent)


def test_a_long_list_of_stop_tokens_costs_its_own_request_only() -> None:
    prompt = [1, 2, 3]
    tokens = reference_tokens(prompt, 30)
    others = [t for t in range(64) if t not in tokens]
    with engine() as e:
        width = e.table.stop_ids.shape[1]
        for i in (5, 10, 15):
            e.add_request(str(i), prompt, greedy(30, stop_token_ids=[*others[: 3 * i], tokens[i]]))
        e.add_request("few", prompt, greedy(30, stop_token_ids=[tokens[7]]))
        e.add_request("none", prompt, greedy(30))
        done = drain(e)
        for i in (5, 10, 15):
            first = tokens.index(tokens[i])
            assert (done[str(i)].output_ids, done[str(i)].stop_reason) == (tokens[: first + 1], tokens[i])
        assert done["few"].output_ids == tokens[: tokens.index(tokens[7]) + 1]
        assert done["none"].output_ids == tokens
        assert e.table.stop_ids.shape[1] == width
        assert not e.table.many_stop_ids


def waiting(count: int) -> tuple[WaitingQueue, list[Request]]:
    queue = WaitingQueue(KeyFunction(lambda r: r.priority))
    requests = [Request(str(i), np.ones(1, np.int32), None, 9, 0, index=i) for i in range(count)]
    for request in requests:
        queue.push(request)
    return queue, requests


def test_removed_requests_leave_the_queue_even_if_they_never_surface() -> None:
    queue, requests = waiting(1000)
    for request in requests[1:]:
        queue.remove(request)
        queue.check_integrity()
    assert len(queue) == 1
    assert sum(len(group._heap) for group in queue._groups.values()) < 200
    assert queue.head() is requests[0]


def test_the_queue_keeps_its_order_through_parking_and_removal() -> None:
    queue, requests = waiting(300)
    for request in requests[:40]:
        assert queue.head() is request
        queue.park(request, passing=request.index % 2 == 0)
    for request in requests[50:250]:
        queue.remove(request)
    queue.unpark_passing()
    queue.unpark(requests[3])
    queue.remove(requests[5])
    queue.unpark(requests[5])
    order = []
    while (head := queue.head()) is not None:
        order.append(head.index)
        queue.pop(head)
    assert order == sorted([*range(0, 40, 2), 3, *range(40, 50), *range(250, 300)])
    assert len(queue) == 20 - 2, "those that are still parked"


def test_a_step_looks_at_no_more_requests_because_others_are_held() -> None:
    class Counting:
        looked = 0

        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            planner = self.planner
            is_held = planner.is_held

            def counted(request: Request) -> bool:
                self.looked += 1
                return is_held(request)

            planner.is_held = counted
            plan = yield
            planner.is_held = is_held
            return plan

    counting = Counting()
    with engine(counting) as e:
        counting.planner = e.parts.planner
        for i in range(400):
            e.add_request(str(i), [1, 2], greedy(2))
            e.context.hold(str(i), Hold("k", "test", "why", 0.0))
        e.add_request("runs", [1, 2], greedy(40))
        e.step()
        counting.looked = 0
        for _ in range(20):
            e.step()
        assert counting.looked <= 20
        e.context.release("7", "test", "k")
        e.step()
        assert e.parts.lifecycle.requests["7"].slot >= 0, "a released one gets its turn at once"
        for i in range(400):
            e.context.release(str(i), "test", "k")
        assert len(drain(e, check=False)) == 401


@pytest.mark.parametrize("use", ["continuous", "static"])
def test_a_request_held_for_a_step_gets_its_turn_in_the_next(use: str) -> None:
    class Holds:
        names: tuple[str, ...] = ("a", "b")

        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            inputs.holds.update(dict.fromkeys(self.names, "this step only"))
            return (yield)

    holds = Holds()
    with engine(holds, scheduler={"use": use}) as e:
        for name in "abc":
            e.add_request(name, [1, 2], greedy(30))
        e.abort("c")
        e.step()
        assert e.explain("a").kind == "hold"
        assert e.table.num_running == 0
        holds.names = ()
        e.step()
        assert e.table.num_running == 2


def test_what_a_connector_failed_to_load_stops_nobody_else() -> None:
    """Blocks of a failed load may once have been in the table of a request that runs now, behind its end."""
    import transfers

    roles = {
        "connector": {"use": "shelf", "good_blocks": 0, "steps": 0},
        "cache": {"use": "paged", "block_size": 4, "num_blocks": 1 + 24},
        "scheduler": {"use": "continuous", "max_num_seqs": 2},
    }
    with engine(transfers, **roles) as e:
        e.add_request("before", [5] * 60, greedy(1))
        drain(e)
        e.add_request("runs", [1, 2, 3], greedy(60))
        for i in range(12):
            e.add_request(str(i), [i] * 30, greedy(2))
        done = drain(e, steps=400)
        assert done["runs"].output_ids == reference_tokens([1, 2, 3], 60), done["runs"].message
        for i in range(12):
            assert done[str(i)].output_ids == reference_tokens([i] * 30, 2)
        check_free(e)


@pytest.mark.parametrize(("good", "found"), [(0, 0), (2, 8), (100, 29)])
def test_only_tokens_that_were_loaded_count_as_cached(good: int, found: int) -> None:
    import transfers

    with engine(transfers, connector={"use": "shelf", "good_blocks": good}) as e:
        e.add_request("a", list(range(30)), greedy(2))
        assert drain(e)["a"].num_cached_tokens == found


def test_a_request_with_prompt_logprobs_loads_nothing() -> None:
    import transfers

    with engine(transfers, connector={"use": "shelf"}) as e:
        e.add_request("a", [3, 1, 4, 1, 5], greedy(3, prompt_logprobs=0))
        positions: list[int] = []
        while e.has_work:
            for _, chunk in e.step().prompt_logprobs:
                positions += range(chunk.start, chunk.start + len(chunk.values.ranks))
        assert positions == [1, 2, 3, 4]
        assert e.context.get("connector").offered == 0


def test_a_connector_is_asked_once_per_admission() -> None:
    import transfers

    cache = {"use": "paged", "block_size": 4, "num_blocks": 1 + 24}
    with engine(transfers, connector={"use": "shelf", "steps": 0}, cache=cache) as e:
        for name in ("a", "b"):
            e.add_request(name, [1] * 60, greedy(30))
        done = drain(e)
        admissions = sum(1 + request.num_preemptions for request in done.values())
        assert e.context.get("connector").offered == admissions


def test_blocks_of_a_slot_that_is_admitted_and_extended_in_one_plan_travel_once() -> None:
    """A scheduler may give a slot first and tokens later, with more blocks than the admission took."""
    plans: list[Any] = []
    scheduler = {"use": "continuous", "max_num_seqs": 5}
    e = Engine(config(cache={"use": "paged", "block_size": 1}, scheduler=scheduler), [fakes])
    try:
        planner, run, scheduler = e.parts.planner, e.hooks.run, e.parts.scheduler

        def schedule(inputs: Any) -> Any:
            planner.begin(inputs)
            slots = planner.runnable()
            planner.extend(slots, planner.pending(slots))
            while (request := scheduler._queue.head()) is not None and planner.admit(request, 0).ok:
                scheduler._queue.pop(request)
                # One position more than it has tokens: as if something else were to be written there.
                planner._lookahead = 3
                planner.extend(np.array([request.slot], np.int32), np.array([request.num_prompt], np.int32))
                planner._lookahead = 0
            return planner.finish()

        e.hooks.schedule = schedule
        e.hooks.run = lambda plan: plans.append(plan) or run(plan)
        for request_id, (prompt, count) in WORK.items():
            e.add_request(request_id, prompt, greedy(count))
        expect(drain(e), WORK)
        for plan in plans:
            fresh = {new.slot for new in plan.new}
            assert not fresh & set(plan.new_blocks[0].slots.tolist())
    finally:
        e.shutdown()


def test_running_rows_that_wait_for_blocks_say_so() -> None:
    """With steps in flight, blocks that come free soon are waited for, and nobody is preempted for them."""
    cache = {"use": "paged", "block_size": 1, "num_blocks": 1 + 96}
    reasons: set[str] = set()
    with engine(kit, cache=cache, executor={"use": "held", "depth": 3}) as e:
        for i in range(8):
            e.add_request(str(i), [i] * 8, greedy(30 - 2 * i))
        steps = 0
        while e.has_work:
            e.step()
            steps += 1
            for slot in e.table.order.tolist():
                if not e.table.in_flight[slot]:
                    wait = e.explain(e.table.requests[slot].request_id)
                    assert wait is not None, "it is in no step, so it waits for something"
                    reasons.add(wait.kind)
        assert steps < 500
        assert "memory" in reasons


def test_the_static_batch_keeps_the_order_of_arrival_when_the_core_puts_requests_back() -> None:
    with engine(kit, scheduler={"use": "static", "max_num_seqs": 3}) as e:
        for i in range(6):
            e.add_request(str(i), [1, 2, i], greedy(9))
        e.step()
        for slot in e.table.order.tolist():
            e.parts.lifecycle.preempt(slot)
        e.step()
        running = [e.table.requests[slot].request_id for slot in e.table.order.tolist()]
        assert running == ["0", "1", "2"]
        assert e.explain("4").numbers["ahead"] == 1
        assert len(drain(e)) == 6
