"""Engines on the fakes whose pool is far too small: what comes back from the tier gives the reference's tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_kit
import machine_kit
import pytest
from engine_kit import check_free, greedy

from trivet.engine import Engine
from trivet.errors import PluginError, TrivetError
from trivet.plan import StepPlan
from trivet.testing.fake_model import reference_tokens
from trivet_offload.segments import SegmentStore
from trivet_offload.worker import OffloadWorker

ROW = 64  # bytes of a block of four words, keys and values
WINDOWS = [None, 9]


@contextmanager
def engine(
    *,
    blocks: int = 30,
    rows: int = 400,
    path: Path | None = None,
    depth: int = 0,
    windows: list[int | None] | None = None,
    cache: dict[str, Any] | None = None,
    plugins: tuple[Any, ...] = (),
    mode: str = "thread",
    **tier: Any,
) -> Iterator[Engine]:
    """``depth`` 0: the inline executor."""
    chosen = {"use": "offload", "host_memory": rows * ROW} | tier
    if path is not None:
        chosen |= {"path": str(path)} | ({} if "disk_memory" in tier else {"disk_memory": "1MiB"})
    settings: dict[str, Any] = {
        "cache": {"use": "paged", "block_size": 4, "num_blocks": blocks} | (cache or {}),
        "cache_tier": [chosen],
    }
    if depth:
        settings["executor"] = {"use": "held", "depth": depth, "mode": mode, "wire": True}
    if windows is not None:
        settings["model"] = {"use": "fake", "windows": windows}
    with engine_kit.engine(machine_kit, *plugins, **settings) as made:
        yield made


def tier(e: Engine) -> Any:
    return e.context.all("cache_tier")[0]


def drain(e: Engine, steps: int = 20_000) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while e.has_work:
        for end in e.step().finished:
            done[end.request.request_id] = end.request
        e.check_integrity()
        tier(e).check_integrity()
        steps -= 1
        assert steps, {request_id: e.explain(request_id) for request_id in e.parts.lifecycle.requests}
    assert not tier(e)._under_way, "a claim was never settled"
    return done


class Sessions:
    """Conversations whose turns repeat everything before them."""

    def __init__(self, e: Engine, count: int, *, first: int = 30, seed: int = 0, windows: Any = (None,)) -> None:
        self.engine, self.rng, self.windows, self.turn = e, random.Random(seed), windows, 0
        self.texts = [self.words(first) for _ in range(count)]

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(64) for _ in range(count)]

    def ask(self, together: int, tokens: int = 3) -> None:
        """Every session's next turn, so many of them at once."""
        self.turn += 1
        for start in range(0, len(self.texts), together):
            batch = range(start, min(start + together, len(self.texts)))
            for i in batch:
                self.engine.add_request(f"{i}/{self.turn}", self.texts[i], greedy(tokens))
            done = drain(self.engine)
            for i in batch:
                request = done[f"{i}/{self.turn}"]
                assert request.finish_reason == "length", request.message
                expected = reference_tokens(self.texts[i], tokens, windows=self.windows)
                assert request.output_ids == expected, f"session {i}, turn {self.turn}"
                self.texts[i] = self.texts[i] + expected + self.words(5)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("windows", [None, WINDOWS], ids=["full", "hybrid"])
def test_sessions_that_exceed_the_pool_come_back_from_the_tier(
    tmp_path: Path, depth: int, where: str, windows: Any
) -> None:
    disk = {"path": tmp_path, "rows": 20} if where == "disk" else {}
    with engine(depth=depth, windows=windows, blocks=60 if windows else 30, **disk) as e:
        sessions = Sessions(e, 6, windows=windows or (None,))
        for _ in range(4):
            sessions.ask(1)
        computed = e.parts.cache.stats()
        assert computed.tier_hits > 0.7 * (computed.prefix_queries - 6 * 30)
        assert tier(e).stats().loaded > 100
        check_free(e)


@pytest.mark.parametrize("depth", [0, 2, 3])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_sessions_side_by_side(tmp_path: Path, depth: int, policy: str) -> None:
    """Requests compete for blocks while others load, and the tier is too small for all of them."""
    with engine(depth=depth, blocks=40, rows=25, path=tmp_path, disk_memory=20_000, policy=policy) as e:
        sessions = Sessions(e, 12, first=20)
        for _ in range(4):
            sessions.ask(6, tokens=8)
        assert e.parts.cache.stats().tier_hits > 0
        assert tier(e).stats().dropped > 0
        check_free(e)


def test_a_restart_finds_what_is_on_disk(tmp_path: Path) -> None:
    with engine(path=tmp_path, rows=20) as e:
        before = Sessions(e, 5)
        before.ask(1)
        before.ask(1)
        texts = before.texts
    with engine(path=tmp_path, rows=20) as e:
        after = Sessions(e, 5)
        after.texts = texts
        after.ask(1)
        stats = e.parts.cache.stats()
        # The last blocks were still in the pool when the engine ended.
        assert stats.tier_hits > 0.6 * stats.prefix_queries


def test_a_preempted_request_comes_back_from_the_tier() -> None:
    with engine(blocks=26, rows=100) as e:
        rng = random.Random(5)
        work = {str(i): [rng.randrange(64) for _ in range(16)] for i in range(4)}
        for request_id, prompt in work.items():
            e.add_request(request_id, prompt, greedy(40))
        done = drain(e)
        assert sum(request.num_preemptions for request in done.values()) > 0
        for request_id, prompt in work.items():
            assert done[request_id].output_ids == reference_tokens(prompt, 40)
        recomputed = sum(request.num_recomputed_tokens for request in done.values())
        assert e.parts.cache.stats().tier_hits > recomputed
        check_free(e)


def test_adapters_and_salts_never_meet() -> None:
    with engine(blocks=30) as e:
        rng = random.Random(1)
        prompt = [rng.randrange(64) for _ in range(40)]
        filler = [[rng.randrange(64) for _ in range(80)] for _ in range(3)]
        for turn in range(3):
            for adapter in (None, "a", "b"):
                e.add_request(f"{turn}/{adapter}", prompt, greedy(4), adapter=adapter)
                (request,) = drain(e).values()
                assert request.output_ids == reference_tokens(prompt, 4, adapter=adapter)
            for i, text in enumerate(filler):
                e.add_request(f"filler {turn}/{i}", text, greedy(2))
                drain(e)
        assert e.parts.cache.stats().tier_hits > 100


def test_a_reset_forgets_the_tier_too(tmp_path: Path) -> None:
    with engine(path=tmp_path, rows=10) as e:
        sessions = Sessions(e, 4)
        sessions.ask(1)
        assert tier(e).stats().held > 0
        assert e.parts.cache.reset()
        assert tier(e).stats().held == 0
        hits = e.parts.cache.stats().tier_hits
        sessions.ask(4)
        assert e.parts.cache.stats().tier_hits == hits
    with engine(path=tmp_path, rows=10) as e:
        assert tier(e).stats().held > 0, "what was stored after the reset"


def test_aborts_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(2)
    with engine(depth=2, blocks=40, rows=20, path=tmp_path) as e:
        texts = [[rng.randrange(64) for _ in range(40)] for _ in range(10)]
        for turn in range(12):
            wanted = rng.sample(range(10), 5)
            for i in wanted:
                e.add_request(f"{i}/{turn}", texts[i], greedy(6))
            for _ in range(rng.randrange(6)):
                e.step()
                e.check_integrity()
                tier(e).check_integrity()
            e.abort([f"{i}/{turn}" for i in wanted if rng.random() < 0.5])
            for request_id, request in drain(e).items():
                if request.finish_reason == "length":
                    text = texts[int(request_id.partition("/")[0])]
                    assert request.output_ids == reference_tokens(text, 6)
        assert e.parts.cache.stats().tier_hits > 0
        check_free(e)


# ---------------------------------------------------------------------- faults


class Broken(OffloadWorker):
    """Starts some transfers only with an exception, and loses content."""

    def __init__(self, context: Any, options: Any) -> None:
        super().__init__(context, options)
        self.rng = random.Random(7)

    def submit(self, transfer: Any, *, store: bool) -> None:
        if self.rng.random() < 0.15:
            raise OSError("no memory")
        if self._tags and self.rng.random() < 0.2:
            self._tags.pop(self.rng.choice(list(self._tags)), None)
        super().submit(transfer, store=store)


@pytest.mark.parametrize("depth", [0, 2, 3])
@pytest.mark.parametrize("windows", [None, WINDOWS], ids=["full", "hybrid"])
def test_transfers_that_fail_cost_time_only(
    tmp_path: Path, depth: int, windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SegmentStore.read
    rng = random.Random(9)

    def read(self: SegmentStore, *args: Any) -> bool:
        return real(self, *args) and rng.random() < 0.8

    monkeypatch.setattr(SegmentStore, "read", read)
    monkeypatch.setattr("trivet_offload.worker.OffloadWorker", Broken)
    blocks = 70 if windows else 40
    with engine(depth=depth, blocks=blocks, rows=30, path=tmp_path, windows=windows) as e:
        sessions = Sessions(e, 8, windows=windows or (None,))
        for turn in range(5):
            sessions.ask(1 + turn % 4, tokens=5)
        assert tier(e).stats().loaded > 0
        check_free(e)


@pytest.mark.parametrize("depth", [2, 3])
def test_loads_that_fail_within_a_step_do_not_stop_others(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row whose load failed has no token for the step that is under way already; the other rows have."""
    monkeypatch.setattr("trivet_offload.worker.OffloadWorker", Broken)
    rng = random.Random(3)
    with engine(depth=depth, blocks=27, rows=40, mode="lazy", policy="arc") as e:
        texts = [[rng.randrange(64) for _ in range(rng.randint(5, 45))] for _ in range(8)]
        work: dict[str, tuple[list[int], int]] = {}
        done: dict[str, Any] = {}
        for i in range(60):
            work[str(i)] = rng.choice(texts), rng.randint(1, 20)
            e.add_request(str(i), work[str(i)][0], greedy(work[str(i)][1]))
            for _ in range(rng.randrange(3)):
                done |= {end.request.request_id: end.request for end in e.step().finished}
        done |= drain(e, steps=3000)
        for request_id, (text, count) in work.items():
            assert done[request_id].output_ids == reference_tokens(text, count), done[request_id].message
            assert done[request_id].num_preemptions < 100


@pytest.mark.parametrize("depth", [0, 2])
def test_steps_that_break_off_lose_their_stores(depth: int) -> None:
    """What the engine half believes to be stored is checked when it is wanted."""
    chaos = machine_kit.Chaos()
    rng = random.Random(4)
    with engine(depth=depth, blocks=40, plugins=(chaos,)) as e:
        texts = [[rng.randrange(64) for _ in range(40)] for _ in range(8)]
        ended = 0
        for turn in range(10):
            for i in rng.sample(range(8), 4):
                e.add_request(f"{i}/{turn}", texts[i], greedy(4))
            for _ in range(rng.randrange(4)):
                e.step()
            chaos.armed["forward"] = RuntimeError("the device is gone")
            for request_id, request in drain(e).items():
                if request.finish_reason == "length":
                    ended += 1
                    assert request.output_ids == reference_tokens(texts[int(request_id[0])], 4)
            chaos.armed.clear()
        assert ended > 3
        check_free(e)


def test_plans_that_never_arrive_are_sent_again() -> None:
    with engine(depth=2, blocks=30) as e:
        sessions = Sessions(e, 5)
        sessions.ask(1)
        sent: list[StepPlan] = []
        run = e.hooks.run

        def flaky(plan: StepPlan) -> Any:
            sent.append(plan)
            if len(sent) % 7 == 3:
                e.parts.executor.refuse = 1  # type: ignore[attr-defined]
            return run(plan)

        e.hooks.run = flaky  # type: ignore[method-assign]
        texts = sessions.texts
        good = 0
        for turn in range(4):
            for i in range(5):
                e.add_request(f"again {i}/{turn}", texts[i], greedy(3))
                (request,) = drain(e).values()
                if request.finish_reason == "length":
                    good += 1
                    assert request.output_ids == reference_tokens(texts[i], 3)
        assert good > 5
        check_free(e)


# ---------------------------------------------------------------------- configuration


def test_it_is_used_only_when_it_is_named() -> None:
    with engine_kit.engine() as e:
        assert not e.context.all("cache_tier")


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(PluginError, match=r"unknown tier_policy 'lur'; did you mean 'lru'\?"), engine(policy="lur"):
        pass


def test_a_second_engine_on_the_folder_is_refused(tmp_path: Path) -> None:
    with engine(path=tmp_path) as first:
        with pytest.raises(TrivetError, match="is in use by another engine"), engine(path=tmp_path):
            pass
        sessions = Sessions(first, 2)
        sessions.ask(2)


def test_memory_smaller_than_a_block_is_refused() -> None:
    with (
        pytest.raises(TrivetError, match="host_memory: 63B is less than one block of this model"),
        engine(host_memory=63),
    ):
        pass
