"""Starts that fail: the error gets out, and whatever was built is shut down, once."""

from __future__ import annotations

from typing import Any

import pytest
from engine_kit import FAKE, check_free, config, drain, greedy

from trivet.engine import Engine
from trivet.errors import CacheMemoryError
from trivet.registry.contexts import EngineContextImpl
from trivet.roles import KVLayout
from trivet.testing import fakes
from trivet.testing.fake_model import reference_tokens
from trivet_inline.executor import InlineExecutor
from trivet_paged.cache import PagedCache
from trivet_paged.options import PagedOptions


class Failing(InlineExecutor):
    """Raises in one of its methods; remembers what became of it."""

    def __init__(self, method: str) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._worker = None
        self.method = method
        self.ended = 0

    def _strike(self, method: str) -> None:
        if self.method == method:
            raise ConnectionError(f"{method} failed")

    def start(self) -> Any:
        self._strike("start")
        self._worker = self._context.worker_context(rank=0, world_size=1)
        self._runner = self._worker.get("runner")
        info = self._runner.load()
        self._strike("after start")
        return info

    def configure_cache(self, layout: KVLayout) -> None:
        self._strike("configure_cache")
        super().configure_cache(layout)

    def shutdown(self) -> None:
        self.ended += 1
        super().shutdown()
        self._strike("shutdown")


class Cache(PagedCache):
    """Remembers that it was shut down."""

    ended = 0

    def shutdown(self) -> None:
        self.ended += 1


def build(method: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Failing, Cache, Any]:
    executor, cache = Failing(method), Cache(None, PagedOptions(block_size=4))
    prepare = EngineContextImpl.prepare_workers

    def prepare_workers(context: EngineContextImpl, **sizes: Any) -> None:
        prepare(context, **sizes)
        executor._context = context  # which an object, unlike a provider, does not get

    monkeypatch.setattr(EngineContextImpl, "prepare_workers", prepare_workers)

    def make() -> Engine:
        settings = config()
        settings["plugins"] = {
            role: choice for role, choice in settings["plugins"].items() if role not in ("executor", "cache")
        }
        return Engine(settings, [fakes, executor, cache])

    return executor, cache, make


@pytest.mark.parametrize("method", ["start", "after start", "configure_cache"])
def test_what_was_built_is_shut_down_when_the_executor_cannot_start(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, cache, make = build(method, monkeypatch)
    with pytest.raises(ConnectionError, match=f"{method} failed"):
        make()
    assert (executor.ended, cache.ended) == (1, 1)


def test_an_exception_in_a_shutdown_stops_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, cache, make = build("shutdown", monkeypatch)
    e = make()
    e.add_request("a", [1, 2], greedy(3))
    assert drain(e)["a"].output_ids == reference_tokens([1, 2], 3)
    e.shutdown()
    e.shutdown()
    assert (executor.ended, cache.ended) == (1, 1)


def test_a_cache_that_is_asked_twice_for_sizes_starts_anew() -> None:
    """Without a length, the first answer says how long a request may be."""
    plugins = FAKE | {
        "executor": {"use": "inline"},
        "cache": {"use": "paged", "block_size": 4, "num_blocks": 11},
        "scheduler": {"use": "continuous"},
    }
    e = Engine({"model": "fake", "plugins": plugins}, [fakes])
    try:
        assert e.max_model_len == 40
        for i in range(3):
            e.add_request(str(i), [1] * 30, greedy(10))
        done = drain(e)
        assert all(r.output_ids == reference_tokens([1] * 30, 10) for r in done.values())
        check_free(e)
    finally:
        e.shutdown()


def test_a_cache_that_keeps_saying_no_is_believed() -> None:
    plugins = FAKE | {"executor": {"use": "inline"}, "cache": {"use": "paged", "memory": 8}}
    with pytest.raises(CacheMemoryError, match="cannot hold one request"):
        Engine({"model": "fake", "plugins": plugins}, [fakes])
