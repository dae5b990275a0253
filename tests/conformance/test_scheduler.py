"""The bundled schedulers pass the suite of their role."""

from __future__ import annotations

from trivet.testing.suites import SchedulerSuite


class TestContinuous(SchedulerSuite):
    use = "continuous"
    arrival_order = True
    steady_decodes = True
    queue_bound = "max_num_queued_reqs"


class TestStatic(SchedulerSuite):
    use = "static"
    arrival_order = True
