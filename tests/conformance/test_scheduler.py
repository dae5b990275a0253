"""The bundled schedulers, with each of their policies, pass the suite of their role."""

from __future__ import annotations

from typing import Any

from trivet.testing.suites import SchedulerSuite


class TestContinuous(SchedulerSuite):
    use = "continuous"
    arrival_order = True
    steady_decodes = True
    tells_waits = True
    queue_bound = "max_num_queued_reqs"


class TestPriority(TestContinuous):
    """Requests of one priority, which come in the order of their arrival."""

    options = {"policy": {"use": "priority", "preemption": True}, "victim": "least_priority"}


class TestShortestFirst(SchedulerSuite):
    use = "continuous"
    options = {"policy": {"use": "shortest_first", "ageing": 1e6}, "victim": "least_computed"}
    steady_decodes = True
    tells_waits = True
    queue_bound = "max_num_queued_reqs"


class TestFairShare(TestContinuous):
    """Requests of one user, which come in the order of their arrival."""

    options = {"policy": {"use": "fair_share", "output_weight": 3}, "victim": "most_blocks"}


class TestDeadline(TestContinuous):
    """Requests that are due after the same time."""

    options = {"policy": {"use": "deadline", "default": 5, "preemption": True}}


class TestMixedSteps(TestContinuous):
    """Prompts in chunks, with few tokens beside rows that decode."""

    options = {"target_inter_token_latency": 1e-6, "min_num_mixed_prefill_tokens": 2}

    def sizes(self, max_num_seqs: int, max_num_batched_tokens: int) -> dict[str, Any]:
        bounds = {"long_prefill_token_threshold": 7, "max_num_mixed_prefill_tokens": 4}
        within = {name: min(tokens, max_num_batched_tokens) for name, tokens in bounds.items()}
        return super().sizes(max_num_seqs, max_num_batched_tokens) | within


class TestStatic(SchedulerSuite):
    use = "static"
    arrival_order = True
    tells_waits = True
