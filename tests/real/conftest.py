"""Engines of real models take gigabytes each."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_at_a_time() -> Iterator[None]:
    """An engine's objects refer to each other, and are too few for the collector to come by itself before memory is
    full of weights that nobody uses."""
    yield
    gc.collect()
