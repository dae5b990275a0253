"""The inline executor, and the suites' own late one, pass the suite of their role."""

from __future__ import annotations

from trivet.testing.suites import ExecutorSuite, _late


class TestInline(ExecutorSuite):
    use = "inline"


class TestInlineOverlapped(ExecutorSuite):
    """The worker on a thread of its own, and two steps in flight."""

    use = "inline"
    options = {"async_scheduling": True}


class TestLate(ExecutorSuite):
    """Three steps in flight."""

    plugins = (_late,)
    use = "late"
    options = {"depth": 3}
