"""The bundled caches pass the suite of their role, and so do the rehearsal's."""

from __future__ import annotations

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


@pytest.mark.full
class TestPagedAtLength(TestPagedBlocksOfFive):
    examples = 2000


@pytest.mark.full
class TestContiguousAtLength(TestContiguous):
    examples = 1000
