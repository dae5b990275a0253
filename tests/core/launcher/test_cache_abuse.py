"""What nobody can mean in the options of cache and tiers: refused by ``config check``, by name, with exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launcher_kit import Run, Site, model_config, model_folder

FREE = 100 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with so much free, whatever others do on this one."""
    monkeypatch.setattr("trivet_torch.memory.free_ram", lambda: FREE)


def complaint(run: Run, site: Site, **roles: Any) -> str:
    result = run("config", "check", model_config(site, model_folder(site), plugins=roles))
    assert result.code == 2, result.out
    assert "Traceback" not in result.err
    assert "no problems found" not in result.out
    return result.err


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**63, 2**70])
def test_absurd_numbers_of_blocks(run: Run, site: Site, cache: str, count: int) -> None:
    error = complaint(run, site, cache={"use": cache, "num_blocks": count})
    assert "plugins.cache." in error


@pytest.mark.parametrize("size", ["1PiB", 10**18, 2**70])
def test_absurd_memory(run: Run, site: Site, size: Any) -> None:
    assert "plugins.cache.memory" in complaint(run, site, cache={"use": "paged", "memory": size})


def test_more_requests_than_there_is_memory_for_their_rows(run: Run, site: Site) -> None:
    error = complaint(run, site, scheduler={"use": "continuous", "max_num_seqs": 2**40}, cache={"memory": "1MiB"})
    assert "max_num_seqs" in error


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"host_memory": 0}, "host_memory: 0B"),
        ({"host_memory": 1}, "host_memory: 1B"),
        ({"policy": "none"}, "policy: unknown tier_policy 'none'; known: arc, lru"),
        ({"policy": ""}, "policy: unknown tier_policy ''"),
        ({"path": ""}, "path: ''"),
        ({"path": " "}, "path: ' '"),
        ({"path": "a\0b"}, "path: "),
        ({"path": "~nobody-of-this-name/kv"}, "path: '~nobody-of-this-name/kv'"),
        ({"path": "/dev/null"}, "path: '/dev/null'"),
        ({"path": "/dev/null/kv"}, "path: '/dev/null/kv'"),
        ({"path": "kv", "disk_memory": 0}, "disk_memory: 0B"),
        ({"path": "kv", "disk_memory": 100}, "disk_memory: 100B"),
        ({"path": "kv", "disk_memory": 2**70}, "disk_memory: 1048576PiB"),
    ],
)
def test_options_of_the_tier(run: Run, site: Site, options: dict[str, Any], named: str) -> None:
    tier = {"use": "offload", "host_memory": "1MiB"} | options
    error = complaint(run, site, cache={"use": "paged", "memory": "1MiB"}, cache_tier=[tier])
    assert f"plugins.cache_tier.offload.{named}" in error
    assert not Path("kv").exists(), "a check writes nothing"


@pytest.mark.parametrize("what", ["file", "below a file", "dangling link", "loop of links"])
def test_something_else_where_the_folder_should_be(run: Run, site: Site, what: str) -> None:
    path = site.folder / "place"
    if what == "dangling link":
        path.symlink_to(site.folder / "nowhere")
    elif what == "loop of links":
        path.symlink_to(path)
    else:
        path.write_text("content", encoding="utf-8")
    if what == "below a file":
        path /= "kv"
    tier = {"use": "offload", "host_memory": "1MiB", "path": str(path)}
    error = complaint(run, site, cache={"use": "paged", "memory": "1MiB"}, cache_tier=tier)
    assert f"plugins.cache_tier.offload.path: '{path}' cannot be used" in error


def test_a_tier_twice(run: Run, site: Site) -> None:
    tiers = [{"use": "offload", "host_memory": "1MiB"}] * 2
    assert "named twice" in complaint(run, site, cache={"use": "paged", "memory": "1MiB"}, cache_tier=tiers)


@pytest.mark.parametrize("cache", [{"use": "contiguous"}, {"use": "paged", "prefix_caching": False}], ids=str)
def test_a_tier_that_could_never_be_of_use(run: Run, site: Site, cache: dict[str, Any]) -> None:
    tier = {"use": "offload", "host_memory": "1MiB"}
    assert "plugins.cache_tier" in complaint(run, site, cache=cache | {"memory": "1MiB"}, cache_tier=tier)
