"""Fair share: users get tokens in proportion to their shares, and nobody saves up by staying away."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

import pytest
from engine_kit import drain, engine, greedy

from trivet.engine import Engine
from trivet.errors import RequestError


def scheduler(seqs: int = 1, **options: Any) -> dict[str, Any]:
    policy = {"use": "fair_share"} | options
    return {"use": "continuous", "max_num_seqs": seqs, "max_num_batched_tokens": 64, "policy": policy}


def add(e: Engine, name: str, user: str | None, *, prompt: int = 4, count: int = 4) -> None:
    extra = {} if user is None else {"user": user.encode()}
    e.add_request(name, [len(name) + i % 50 for i in range(prompt)], greedy(count), extra=extra)


def counters(e: Engine) -> dict[str, float]:
    found: dict[str, float] = e.parts.scheduler._policy._counters
    return found


def test_a_user_with_many_requests_does_not_keep_others_waiting() -> None:
    with engine(scheduler=scheduler()) as e:
        for number in range(6):
            add(e, f"many-{number}", "many")
        for number in range(2):
            add(e, f"few-{number}", "few")
        ends = list(drain(e))
    assert ends[:4] == ["many-0", "few-0", "many-1", "few-1"], "they take turns while both wait"
    assert ends[4:] == ["many-2", "many-3", "many-4", "many-5"]


def test_requests_without_a_user_are_of_one_user() -> None:
    with engine(scheduler=scheduler()) as e:
        for number in range(3):
            add(e, f"nobody-{number}", None)
        e.add_request("named", [1, 2, 3, 4], greedy(4, extra_args={"user": "somebody"}))
        assert list(drain(e)) == ["nobody-0", "named", "nobody-1", "nobody-2"]


def test_tokens_count_by_their_weights() -> None:
    with engine(cache={"use": "paged", "block_size": 4, "prefix_caching": False}, scheduler=scheduler()) as e:
        add(e, "a", "A", prompt=10, count=5)
        add(e, "b", "B", prompt=3, count=8)
        drain(e)
        e.parts.scheduler._policy.begin_step()
        assert counters(e) == {"A": 10 + 2 * 5, "B": 3 + 2 * 8}


def test_what_the_cache_holds_costs_nothing() -> None:
    with engine(scheduler=scheduler()) as e:
        add(e, "a", "A", prompt=21, count=1)
        drain(e)
        add(e, "b", "B", prompt=21, count=1)
        before = counters(e)["B"]
        drain(e)
        e.parts.scheduler._policy.begin_step()
        assert counters(e)["B"] - before == 1 + 2


def test_shares_are_what_users_are_served_in_proportion_to() -> None:
    with engine(scheduler=scheduler(shares={"big": 3.0})) as e:
        for number in range(24):
            add(e, f"big-{number}", "big")
            add(e, f"small-{number}", "small")
        ends = list(drain(e))
    first = [name.split("-")[0] for name in ends[:24]]
    assert 17 <= first.count("big") <= 19


def test_a_user_who_comes_back_has_saved_nothing_up() -> None:
    with engine(scheduler=scheduler()) as e:
        add(e, "early", "away", count=1)
        for number in range(12):
            add(e, f"busy-{number}", "busy")
        ends: list[str] = []
        while len(ends) < 7:
            ends += [end.request.request_id for end in e.step().finished]
        for number in range(4):
            add(e, f"back-{number}", "away")
        ends += list(drain(e))
    order = [name.split("-")[0] for name in ends[8:15]]
    assert order.count("back") <= 4
    assert all(order[i] != order[i + 1] for i in range(6)), "turns from the return on, with no lead"


def test_a_preempted_prompt_is_not_charged_twice() -> None:
    cache = {"use": "paged", "block_size": 4, "num_blocks": 26, "prefix_caching": False}
    with engine(cache=cache, scheduler=scheduler(4)) as e:
        for number in range(4):
            add(e, f"r{number}", f"u{number}", prompt=16, count=40)
        done = drain(e)
        assert sum(request.num_preemptions for request in done.values()) > 0
        e.parts.scheduler._policy.begin_step()
        assert counters(e) == {f"u{number}": 16 + 2 * 40 for number in range(4)}


def test_users_who_left_are_forgotten() -> None:
    with engine(scheduler=scheduler(8)) as e:
        for number in range(1500):
            add(e, f"r{number}", f"user-{number}", prompt=2, count=1)
            if number % 8 == 7:
                drain(e, check=False)
        assert len(counters(e)) < 400


def test_a_user_that_is_no_text_is_refused() -> None:
    with engine(scheduler=scheduler()) as e:
        with pytest.raises(RequestError, match="^extra_args.user: must be a string, got 7$"):
            e.add_request("bad", [1], greedy(1, extra_args={"user": 7}))
        with pytest.raises(RequestError, match=r"^extra\['user'\]: must be UTF-8, got b'\\xff'$"):
            e.add_request("bad", [1], greedy(1), extra={"user": b"\xff"})
        assert not e.has_work
