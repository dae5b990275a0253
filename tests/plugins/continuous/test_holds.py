"""Holds that come and go while the queue is being looked at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

from engine_kit import drain, engine, greedy

from trivet.context import Hold
from trivet.hookspecs import hookimpl
from trivet.testing.fake_model import reference_tokens

SHARED = list(range(1, 34))


def test_a_release_that_arrives_during_an_admission_sets_nobody_else_aside() -> None:
    """The cache holds a follower, which makes earlier releases take effect: an older request is then the queue's head,
    and must not be parked in the follower's place."""

    class Late:
        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            if inputs.step_id == 1:
                e.context.release("old", "test", "mine")
            return (yield)

    cache = {"use": "paged", "block_size": 4}
    scheduler = {"use": "continuous", "max_num_batched_tokens": 256}
    with engine(Late(), cache=cache, scheduler=scheduler) as e:
        e.add_request("old", [7, 8, 9], greedy(4))
        e.context.hold("old", Hold("mine", "test", "because", 0.0))
        e.add_request("leader", SHARED, greedy(4))
        e.add_request("follower", [*SHARED, 5], greedy(4))
        e.step()
        assert e.table.num_running == 2, "the old one and the leader, for which the follower waits"
        done = drain(e, steps=100)
        assert done["old"].output_ids == reference_tokens([7, 8, 9], 4)
        assert done["leader"].output_ids == reference_tokens(SHARED, 4)
        assert done["follower"].output_ids == reference_tokens([*SHARED, 5], 4)
        assert done["follower"].num_cached_tokens == 32


def test_who_takes_the_slot_of_a_request_that_is_held_for_a_step_runs_in_that_step() -> None:
    class Holding:
        on = False

        @hookimpl(wrapper=True)
        def trivet_schedule(self, inputs: Any) -> Any:
            if self.on:
                inputs.holds["late"] = "not now"
            return (yield)

    holding = Holding()
    policy = {"use": "priority", "preemption": True}
    with engine(holding, scheduler={"use": "continuous", "max_num_seqs": 1, "policy": policy}) as e:
        e.add_request("late", [1, 2, 3], greedy(5), priority=5)
        e.step()
        holding.on = True
        e.add_request("urgent", [4, 5], greedy(3), priority=0)
        for count in (1, 2, 3):
            (request,) = e.step().requests
            assert (request.request_id, e.table.num_output(request)) == ("urgent", count)
        holding.on = False
        assert drain(e)["late"].output_ids == reference_tokens([1, 2, 3], 5)
