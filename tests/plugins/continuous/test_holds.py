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
