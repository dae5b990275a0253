"""What the static scheduler says of a step as a whole."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from engine_kit import drain, engine, greedy


def test_those_behind_a_batch_wait_for_their_turn() -> None:
    with engine(scheduler={"use": "static", "max_num_seqs": 2, "max_num_batched_tokens": 6}) as e:
        scheduler = e.parts.scheduler
        assert scheduler.waits().queue is None
        for name in "abc":
            e.add_request(name, [ord(name) % 64] * 6, greedy(3))
        e.step()
        waits = scheduler.waits()
        assert waits.queue is not None
        assert (waits.queue.kind, waits.queue.numbers) == ("turn", {"running": 2, "waiting": 1})
        assert waits.compute == {e.parts.lifecycle.requests["b"].slot}, "the budget went to the first one's prompt"
        assert waits.queue.detail == "a batch of 2 requests runs until its last one has ended"
        assert set(drain(e)) == {"a", "b", "c"}
        assert scheduler.waits().queue is None


def test_one_request_is_told_as_one() -> None:
    with engine(scheduler={"use": "static", "max_num_seqs": 1}) as e:
        for name in "abc":
            e.add_request(name, [1, 2], greedy(3))
        e.step()
        wait = e.explain("c")
        assert wait is not None
        assert wait.detail == "a batch of 1 request runs until its last one has ended; 1 is ahead of it"
