"""The bundled caches pass the suite of their role."""

from __future__ import annotations

import conformance_providers
import pytest

from trivet.testing.suites import CacheSuite


class TestPaged(CacheSuite):
    use = "paged"
    on_demand = finds_prefixes = True


class TestPagedOneTokenPerBlock(TestPaged):
    options = {"block_size": 1}


class TestPagedBlocksOfFive(TestPaged):
    options = {"block_size": 5, "num_blocks": 20}


class TestPagedWithATier(TestPaged):
    options = {"block_size": 4}
    tiers = (30,)


class TestPagedHybrid(TestPaged):
    """Two full layers, a sliding and a chunked one, and one whose blocks are twice as long."""

    options = {"block_size": 4}
    kinds = ("full", "sliding", "full", "chunked")
    windows = (None, 6, None, 8)
    heads = (2, 2, 2, 1)


class TestPagedWithoutPrefixCache(TestPaged):
    options = {"block_size": 4, "prefix_caching": False}
    finds_prefixes = False


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
