"""The fake runner and the torch runner pass the suite of their role."""

from __future__ import annotations

from trivet.testing.suites import RunnerSuite


class TestFake(RunnerSuite):
    use = "fake"


class TestTorch(RunnerSuite):
    use = "torch_runner"
    pools = False  # it pools torch tensors, and the fake model's are numpy arrays
