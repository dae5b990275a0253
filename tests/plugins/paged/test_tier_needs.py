"""What a cache tier needs of the cache."""

from __future__ import annotations

from typing import Any

import pytest

from trivet.engine import Engine
from trivet.errors import PluginError
from trivet.testing import fakes

FAKE: dict[str, Any] = {role: {"use": "fake"} for role in ("model", "attention", "sampler", "runner", "tokenizer")}


@pytest.mark.parametrize("cache", [{"use": "paged", "prefix_caching": False}, {"use": "contiguous"}], ids=str)
def test_a_tier_beside_a_cache_that_names_no_blocks_is_refused(cache: dict[str, Any]) -> None:
    roles = FAKE | {"executor": {"use": "inline"}, "scheduler": {"use": "continuous"}, "cache": cache}
    tier = {"use": "offload", "host_memory": "1MiB"}
    with pytest.raises(PluginError, match=r"plugins\.cache_tier: "):
        Engine({"model": "fake", "max_model_len": 64, "plugins": roles | {"cache_tier": [tier]}}, [fakes])
