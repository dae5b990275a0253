"""The bundled caches pass the suite of their role."""

from __future__ import annotations

import conformance_providers
import pytest

from trivet.testing.suites import CacheSuite


class TestPaged(CacheSuite):
    use = "paged"
    on_demand = True


class TestPagedOneTokenPerBlock(CacheSuite):
    use = "paged"
    on_demand = True
    options = {"block_size": 1}


class TestPagedBlocksOfFive(CacheSuite):
    use = "paged"
    on_demand = True
    options = {"block_size": 5, "num_blocks": 20}


class TestContiguous(CacheSuite):
    use = "contiguous"


class TestSharing(CacheSuite):
    """A cache of these tests that finds prefixes and forks."""

    plugins = (conformance_providers,)
    use = "sharing"
    on_demand = finds_prefixes = True
    examples = 40


class TestWindow(CacheSuite):
    """A cache of these tests that gives blocks back when they leave the window."""

    plugins = (conformance_providers,)
    use = "window"
    on_demand = True
    windows = (8, 8)


@pytest.mark.full
class TestSharingAtLength(TestSharing):
    examples = 2000


@pytest.mark.full
class TestPagedAtLength(TestPagedBlocksOfFive):
    examples = 2000


@pytest.mark.full
class TestContiguousAtLength(TestContiguous):
    examples = 1000
