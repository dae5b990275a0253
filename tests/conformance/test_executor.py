"""The inline executor, and the suites' own late one, pass the suite of their role."""

from __future__ import annotations

from trivet.testing.suites import ExecutorSuite, _late


class TestInline(ExecutorSuite):
    use = "inline"


class TestLate(ExecutorSuite):
    """Three steps in flight."""

    plugins = (_late,)
    use = "late"
    options = {"depth": 3}
