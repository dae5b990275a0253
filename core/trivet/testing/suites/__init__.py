"""A conformance suite per role: subclass one in your tests, name your provider, and pytest runs it.

    from trivet.testing.suites import SchedulerSuite

    class TestMyScheduler(SchedulerSuite):
        use = "my_scheduler"

Needs ``pip install "trivet[testing]"``. Every suite compares with a slow, obvious reference; a failure names the
rule that was broken and where it is documented. See docs/plugins.md."""

from __future__ import annotations

from trivet.testing.suites._base import ArraySuite, Suite
from trivet.testing.suites.attention import AttentionSuite
from trivet.testing.suites.cache import CacheSuite
from trivet.testing.suites.cache_tier import CacheTierSuite
from trivet.testing.suites.executor import ExecutorSuite
from trivet.testing.suites.logits_processor import LogitsProcessorSuite
from trivet.testing.suites.model import ModelSuite
from trivet.testing.suites.runner import RunnerSuite
from trivet.testing.suites.sampler import SamplerSuite
from trivet.testing.suites.scheduler import SchedulerSuite
from trivet.testing.suites.tokenizer import TokenizerSuite

__all__ = [
    "ArraySuite",
    "AttentionSuite",
    "CacheSuite",
    "CacheTierSuite",
    "ExecutorSuite",
    "LogitsProcessorSuite",
    "ModelSuite",
    "RunnerSuite",
    "SamplerSuite",
    "SchedulerSuite",
    "Suite",
    "TokenizerSuite",
]
