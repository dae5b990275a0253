"""The fake runner and the torch runner pass the suite of their role."""

from __future__ import annotations

from trivet.provider import Provider
from trivet.testing.fakes import FakeModelOptions
from trivet.testing.suites import RunnerSuite


class TestFake(RunnerSuite):
    use = "fake"


class TestTorch(RunnerSuite):
    plugins = (Provider("model", "fake_on_torch", "conformance_tensors:TensorModel", options=FakeModelOptions),)
    use = "torch_runner"
    fake_model = "fake_on_torch"
