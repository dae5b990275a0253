"""The scheduler passes the suite of its role, and puts short prompts first."""

from __future__ import annotations

from trivet.testing.suites import SchedulerSuite
from trivet_schemas.sampling import SamplingParams


class TestShortestFirst(SchedulerSuite):
    use = "acme_shortest"
    max_wait_steps = 150

    def test_the_shortest_prompt_is_first(self) -> None:
        with self.scheduling(seqs=1) as (engine, _):
            for length in (20, 5, 30, 1):
                engine.add_request(str(length), [1] * length, SamplingParams(max_tokens=2, temperature=0))
            order = []
            while engine.has_work:
                order += [end.request.request_id for end in engine.step().finished]
        assert order == ["1", "5", "20", "30"]

    def test_patience_ends(self) -> None:
        with self.scheduling(seqs=1, options={"patience": 3}) as (engine, _):
            engine.add_request("long", [1] * 30, SamplingParams(max_tokens=1, temperature=0))
            order = []
            for number in range(20):
                engine.add_request(str(number), [1], SamplingParams(max_tokens=2, temperature=0))
                engine.add_request(f"{number}b", [1], SamplingParams(max_tokens=2, temperature=0))
                order += [end.request.request_id for end in engine.step().finished]
        assert "long" in order
