"""What a queue takes, how long it keeps it, whom an urgent request displaces, and what is said of all that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

import pytest
from engine_kit import drain, engine, expect, greedy

from trivet.errors import OverloadedError


def options(**more: Any) -> dict[str, Any]:
    scheduler = {"use": "continuous", "max_num_batched_tokens": 64, "max_num_seqs": 1} | more
    return {"scheduler": scheduler, "cache": {"use": "paged", "block_size": 4}}


def test_a_queue_of_too_many_tokens_refuses_with_numbers() -> None:
    with engine(**options(max_num_queued_tokens=20)) as e:
        e.add_request("running", [1] * 30, greedy(5))
        e.step()
        e.add_request("first", [2] * 15, greedy(5))
        with pytest.raises(OverloadedError, match="1 request waits with 15 prompt tokens, 6 more.*= 20"):
            e.add_request("second", [3] * 6, greedy(5))
        e.add_request("third", [4] * 5, greedy(5))
        e.abort("first")
        e.add_request("fourth", [3] * 15, greedy(5))
        assert set(drain(e)) == {"running", "first", "third", "fourth"}
        e.add_request("long", [5] * 60, greedy(5))
        assert "long" in drain(e), "a queue in which nobody waits takes any request"


def test_a_request_that_waits_for_too_long_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("trivet_continuous.scheduler.time.monotonic", lambda: now[0])
    with engine(**options(max_queue_seconds=30)) as e:
        e.add_request("running", [1] * 3, greedy(60))
        e.step()
        e.add_request("early", [2] * 3, greedy(5))
        now[0] += 20
        e.add_request("late", [3] * 3, greedy(5))
        now[0] += 11
        ended = {end.request.request_id: end for end in e.step().finished}
        assert list(ended) == ["early"]
        assert ended["early"].reason == "error"
        message = ended["early"].message or ""
        assert "waited 31.0 s" in message
        assert "max_queue_seconds = 30" in message
        assert "besides it, 1 request waits and 1 run" in message
        now[0] += 5
        done = drain(e)
        assert {name: request.finish_reason for name, request in done.items()} == {
            "running": "length",
            "late": "length",
        }


def test_a_preempted_request_does_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("trivet_continuous.scheduler.time.monotonic", lambda: now[0])
    settings = options(max_queue_seconds=5, max_num_seqs=8)
    settings["cache"] = {"use": "paged", "block_size": 4, "num_blocks": 26}
    work = {str(i): ([i + 1] * 16, 40) for i in range(4)}
    with engine(**settings) as e:
        for request_id, (prompt, count) in work.items():
            e.add_request(request_id, prompt, greedy(count))
        e.step()
        now[0] += 100
        done = drain(e)
        assert sum(request.num_preemptions for request in done.values()) > 0
        expect(done, work)


@pytest.mark.parametrize("memory", [None, 13], ids=["slots", "blocks"])
def test_an_urgent_request_takes_the_place_of_a_less_urgent_one(memory: int | None) -> None:
    settings = options(policy={"use": "priority", "preemption": True}, max_num_seqs=2 if memory is None else 8)
    settings["cache"] = {"use": "paged", "block_size": 4} | ({"num_blocks": memory} if memory else {})
    settings["max_model_len"] = 40
    work = {"a": ([1] * 16, 6), "b": ([2] * 16, 6), "urgent": ([3] * 16, 6), "last": ([4] * 8, 6)}
    with engine(**settings) as e:
        e.add_request("a", work["a"][0], greedy(6), priority=1)
        e.add_request("b", work["b"][0], greedy(6), priority=2)
        e.step()
        e.add_request("last", work["last"][0], greedy(6), priority=2)
        e.add_request("urgent", work["urgent"][0], greedy(6), priority=0)
        e.step()
        assert e.parts.lifecycle.requests["urgent"].slot >= 0
        assert e.parts.lifecycle.requests["b"].slot < 0
        done = drain(e)
        assert [done[name].num_preemptions for name in ("a", "b", "urgent", "last")] == [0, 1, 0, 0]
        assert set(list(done)[:2]) == {"a", "urgent"}
        expect(done, work)


def test_requests_of_one_priority_do_not_displace_each_other() -> None:
    with engine(**options(policy={"use": "priority", "preemption": True}, max_num_seqs=2)) as e:
        for name in "abcd":
            e.add_request(name, [ord(name) % 64] * 5, greedy(5), priority=1)
        done = drain(e)
        assert list(done) == ["a", "b", "c", "d"]
        assert not any(request.num_preemptions for request in done.values())


def test_what_is_said_of_a_whole_step() -> None:
    with engine(**options(max_num_seqs=2, max_num_batched_tokens=8)) as e:
        scheduler = e.parts.scheduler
        assert scheduler.waits().queue is None
        for name in "abc":
            e.add_request(name, [ord(name) % 64] * 12, greedy(5))
        e.step()
        waits = scheduler.waits()
        assert waits.queue is not None
        assert (waits.queue.kind, waits.queue.numbers["token_budget"]) == ("compute", 8)
        e.step()
        assert scheduler.waits().compute == frozenset(), "four tokens for each"
        e.step()
        drain(e)
        assert scheduler.waits().queue is None


def test_why_a_step_left_requests_without_memory() -> None:
    settings = options(max_num_seqs=8)
    settings["cache"] = {"use": "paged", "block_size": 4, "num_blocks": 11, "prefix_caching": False}
    settings["max_model_len"] = 40
    with engine(**settings) as e:
        for name in "abc":
            e.add_request(name, [ord(name) % 64] * 16, greedy(10))
        e.step()
        waits = e.parts.scheduler.waits()
        assert waits.queue is not None
        assert (waits.queue.kind, waits.queue.numbers) == ("memory", {"tokens": 16})
        assert e.parts.scheduler.waits().queue is waits.queue, "said again without being made again"
        wait = e.explain("c")
        assert wait is not None
        assert wait.numbers == {"free": 2, "total": 10}
        drain(e)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_step_that_displaces_somebody_computes_whom_it_was_for(slots: int) -> None:
    policy = {"use": "priority", "preemption": True}
    with engine(scheduler={"use": "continuous", "max_num_seqs": slots, "policy": policy}) as e:
        for i in range(slots):
            e.add_request(f"running {i}", [1, 2, i], greedy(9), priority=5 * i + 1 - (slots > 1))
        e.step()
        e.add_request("urgent", [4, 5], greedy(3), priority=0)
        requests = [request.request_id for request in e.step().requests]
        assert sorted(requests) == ["running 0", "urgent"][2 - slots :]
        assert e.explain("urgent") is None
        assert e.recent_steps(1)[0]["preempted"] == [f"running {slots - 1}"]
        drain(e)


def test_one_request_is_told_as_one() -> None:
    with engine(**options()) as e:
        e.add_request("a", [1, 2], greedy(3))
        e.add_request("b", [1, 2], greedy(3))
        e.step()
        wait = e.explain("b")
        assert wait is not None
        assert wait.detail.startswith("1 request runs, max_num_seqs is 1")
