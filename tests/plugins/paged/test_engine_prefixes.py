"""Engines with the prefix cache: the tokens stay those of the naive loop, and work is saved where it should be."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from engine_kit import FAKE, check_free, drain, engine, greedy

from trivet.errors import CacheMemoryError, RequestError
from trivet.hookspecs import hookimpl
from trivet.testing.fake_model import reference_tokens
from trivet_schemas.sampling import SamplingParams


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(length)]


def model(windows: list[int | None]) -> dict[str, Any]:
    return FAKE["model"] | {"windows": windows}


# ---------------------------------------------------------------------- full hits


@pytest.mark.parametrize("windows", [[None], [5], [None, 5, None]], ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_a_prompt_of_whole_blocks_twice(block_size: int, blocks: int, windows: Any) -> None:
    """All of it is in the cache; the last token is computed all the same."""
    prompt = prompt_of(blocks * block_size)
    wanted = reference_tokens(prompt, 5, windows=windows)
    with engine(cache={"use": "paged", "block_size": block_size}, model=model(windows)) as e:
        for turn in range(3):
            e.add_request("a", prompt, greedy(5))
            done = drain(e)["a"]
            assert done.output_ids == wanted
            assert done.num_cached_tokens == (0 if turn == 0 else (blocks - 1) * block_size)
        check_free(e)


@pytest.mark.parametrize("windows", [[None], [None, 5, None]], ids=str)
@pytest.mark.parametrize("budget", [3, 100])
def test_a_prompt_of_whole_blocks_twice_in_one_batch(budget: int, windows: Any) -> None:
    prompt = prompt_of(16)
    wanted = reference_tokens(prompt, 6, windows=windows)
    scheduler = {"use": "continuous", "max_num_batched_tokens": budget}
    with engine(cache={"use": "paged", "block_size": 4}, model=model(windows), scheduler=scheduler) as e:
        for name in "abc":
            e.add_request(name, prompt, greedy(6))
        done = drain(e)
        assert [done[name].output_ids for name in "abc"] == [wanted] * 3
        check_free(e)


def test_a_conversation_computes_its_new_turns_only() -> None:
    history = prompt_of(10)
    with engine(cache={"use": "paged", "block_size": 4}, max_model_len=400) as e:
        for turn in range(20):
            e.add_request("a", history, greedy(4))
            done = drain(e)["a"]
            # What was drawn last is not computed before the next turn.
            assert done.num_cached_tokens == (0 if turn == 0 else (len(history) - 1 - 6) // 4 * 4)
            assert done.output_ids == reference_tokens(history, 4)
            history += done.output_ids + prompt_of(6, seed=turn)


# ---------------------------------------------------------------------- short of memory


@pytest.mark.parametrize("windows", [[None], [None, 5, None]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_preempted_requests_find_their_own_blocks(seed: int, windows: Any) -> None:
    """Few blocks and a common prefix: all finish with the tokens of a run with ample memory."""
    prefix = prompt_of(12, seed)
    work = {f"r{i}": [*prefix, *prompt_of(1 + i % 5, 100 + i)] for i in range(10)}
    num_blocks = 1 + (22 if windows == [None] else 60)
    cache = {"use": "paged", "block_size": 4, "num_blocks": num_blocks}
    scheduler = {"use": "continuous", "max_num_batched_tokens": 24, "max_num_seqs": 8}
    with engine(cache=cache, model=model(windows), scheduler=scheduler, max_model_len=60) as e:
        for name, prompt in work.items():
            e.add_request(name, prompt, greedy(30))
        done = drain(e, steps=2000)
        for name, prompt in work.items():
            assert done[name].output_ids == reference_tokens(prompt, 30, windows=windows), name
        if windows == [None]:
            again = [r for r in done.values() if r.num_preemptions]
            assert again
            lost = sum(r.num_recomputed_tokens for r in again)
            assert lost < sum(len(work[r.request_id]) for r in again), "most of it was found again"
        check_free(e)


def test_a_chunk_fits_but_the_preempted_prompt_does_not() -> None:
    """It must not be begun, thrown out and begun again: preemptions are few, and all finish soon."""
    cache = {"use": "paged", "block_size": 4, "num_blocks": 1 + 20}
    scheduler = {"use": "continuous", "max_num_batched_tokens": 8, "max_num_seqs": 4}
    work = {f"r{i}": prompt_of(40, seed=i) for i in range(4)}
    steps = 0
    with engine(cache=cache, scheduler=scheduler, max_model_len=80) as e:
        for name, prompt in work.items():
            e.add_request(name, prompt, greedy(30))
        done: dict[str, Any] = {}
        while e.has_work:
            done |= {end.request.request_id: end.request for end in e.step().finished}
            e.check_integrity()
            steps += 1
            assert steps < 400
        assert max(r.num_preemptions for r in done.values()) <= 3
        for name, prompt in work.items():
            assert done[name].output_ids == reference_tokens(prompt, 30)


def test_what_never_fits_is_refused_and_the_next_one_runs() -> None:
    cache = {"use": "paged", "block_size": 4, "num_blocks": 1 + 16}
    with pytest.raises(CacheMemoryError, match="enough for 64"), engine(cache=cache, max_model_len=256):
        pass
    with engine(cache=cache, max_model_len=64) as e:
        with pytest.raises(RequestError):
            e.add_request("large", prompt_of(100), greedy(5))
        e.add_request("small", prompt_of(5), greedy(5))
        assert drain(e)["small"].output_ids == reference_tokens(prompt_of(5), 5)


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize("window", [7, 8, 9])
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("layers", ["sliding", "mixed"])
def test_windows_in_chunks(layers: str, block_size: int, budget: int, window: int) -> None:
    windows = [window] if layers == "sliding" else [window, None, window]
    prompt = prompt_of(37)
    scheduler = {"use": "continuous", "max_num_batched_tokens": budget}
    with engine(cache={"use": "paged", "block_size": block_size}, model=model(windows), scheduler=scheduler) as e:
        wanted = reference_tokens(prompt, 20, windows=windows)
        for turn in range(2):
            e.add_request("a", prompt, greedy(20))
            done = drain(e)["a"]
            assert done.output_ids == wanted
            assert (done.num_cached_tokens > 0) == (turn > 0)
        check_free(e)


def test_a_window_gives_its_blocks_back_while_the_request_runs() -> None:
    scheduler = {"use": "continuous", "max_num_batched_tokens": 4}
    with engine(cache={"use": "paged", "block_size": 4}, model=model([8]), scheduler=scheduler) as e:
        e.add_request("a", prompt_of(40), greedy(40))
        most = 0
        while e.has_work:
            e.step()
            most = max(most, e.parts.cache.stats().used)
        assert most <= (8 - 1 + 4 + 4 - 2) // 4 + 1


def test_a_hit_behind_the_window_needs_only_the_window() -> None:
    """What lies before it may be gone; the full layers' blocks may not."""
    prompt = prompt_of(40)
    for windows, finds in (([8], True), ([None, 8], False)):
        with engine(cache={"use": "paged", "block_size": 4}, model=model(windows)) as e:
            e.add_request("a", prompt, greedy(1))
            drain(e)
            cache = e.parts.cache
            request = e.add_request("b", prompt, greedy(1))
            (first,) = cache._hasher.chain(request, request.prompt_ids, 4)
            lost = [index[first] for index in cache._pool.index if first in index]
            assert lost
            cache.invalidate([np.array(lost, np.int32)])
            done = drain(e)["b"]
            assert (done.num_cached_tokens > 0) == finds
            assert done.output_ids == reference_tokens(prompt, 1, windows=windows)


# ---------------------------------------------------------------------- events, reset, figures


class Watch:
    """Keeps a copy of what can be found, as an index outside the engine would."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, bytes], int] = {}
        self.details: list[Any] = []
        self.cleared = 0

    @hookimpl
    def trivet_blocks_evicted(self, event: Any) -> None:
        self.cleared += event.cleared
        if event.cleared:
            self.found = {key: block for key, block in self.found.items() if key[0] != event.group}
        for digest in event.hashes:
            del self.found[event.group, digest]

    @hookimpl
    def trivet_blocks_stored(self, event: Any) -> None:
        self.details.append(event)
        for block, digest in zip(event.blocks, event.hashes, strict=True):
            assert (event.group, digest) not in self.found
            self.found[event.group, digest] = block


@pytest.mark.parametrize("windows", [[None], [5, None]], ids=str)
def test_events_keep_an_index_outside_up_to_date(windows: Any) -> None:
    watch = Watch()
    cache = {"use": "paged", "block_size": 4, "num_blocks": 1 + 50}
    with engine(watch, cache=cache, model=model(windows)) as e:
        for i in range(30):
            e.add_request(f"r{i}", prompt_of(10 + i % 20, seed=i % 7), greedy(6), adapter="a" if i % 3 == 0 else None)
        while e.has_work:
            e.step()
            index = e.parts.cache._pool.index
            assert watch.found == {(g, d): block for g, found in enumerate(index) for d, block in found.items()}
        assert e.parts.cache.stats().evicted > 0
        assert e.parts.cache.reset()
        e.add_request("last", [1, 2], greedy(1))
        drain(e)
        assert watch.cleared == len(index)
        assert not watch.found


def test_events_say_which_tokens_are_stored() -> None:
    watch = Watch()
    prompt = prompt_of(18)
    with engine(watch, cache={"use": "paged", "block_size": 4}) as e:
        e.add_request("a", prompt, greedy(8), adapter="x")
        drain(e)
    known = prompt + reference_tokens(prompt, 8, adapter="x")
    stored: list[int] = []
    parent = None
    for event in watch.details:
        assert event.detail["block_size"] == 4
        assert event.detail["tags"] == {"adapter": b"x"}
        assert event.detail["parent"] == parent
        stored += event.detail["token_ids"]
        parent = event.hashes[-1]
    assert stored == known[:24]


def test_a_reset_waits_until_nothing_is_in_use() -> None:
    prompt = prompt_of(20)
    with engine(cache={"use": "paged", "block_size": 4}) as e:
        e.add_request("a", prompt, greedy(4))
        e.step()
        assert not e.parts.cache.reset()
        e.add_request("b", prompt, greedy(4))
        assert drain(e)["b"].num_cached_tokens == 16, "what could not be forgotten is still there"
        assert e.parts.cache.reset()
        e.add_request("c", prompt, greedy(4))
        assert drain(e)["c"].num_cached_tokens == 0


def test_figures_count_tokens_asked_for_and_found() -> None:
    prompt = prompt_of(20)
    with engine(cache={"use": "paged", "block_size": 4, "num_blocks": 1 + 24}) as e:
        for _ in range(3):
            e.add_request("a", prompt, greedy(1))
            drain(e)
        stats = e.parts.cache.stats()
        assert (stats.prefix_queries, stats.prefix_hits, stats.tier_hits) == (60, 32, 0)
        assert stats.evicted == 0
        e.add_request("a", prompt, greedy(1, prompt_logprobs=0))
        assert drain(e)["a"].num_cached_tokens == 0
        e.add_request("large", prompt_of(90, seed=3), greedy(1))
        drain(e)
        stats = e.parts.cache.stats()
        assert stats.evicted > 0
        assert stats.free == stats.total == 24


def test_salts_keep_users_apart() -> None:
    prompt = prompt_of(20)
    with engine(cache={"use": "paged", "block_size": 4}) as e:
        found = []
        for salt in (None, "a", "b", "a", None):
            e.add_request("r", prompt, SamplingParams(max_tokens=3, temperature=0, cache_salt=salt))
            done = drain(e)["r"]
            assert done.output_ids == reference_tokens(prompt, 3)
            found.append(done.num_cached_tokens)
        assert found == [0, 0, 0, 16, 16]
