"""What a step does, counted: nothing that grows with the number of waiting requests, no hash computed twice."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest

from trivet.engine import Engine
from trivet.events import BlocksStored
from trivet.hookspecs import hookimpl
from trivet.simulation import IdTokenizer, SimulatedExecutor, simple_layers
from trivet_paged import hashing
from trivet_schemas.sampling import SamplingParams

VOCAB = 1000
rng = np.random.default_rng(0)


def prompt(length: int) -> list[int]:
    return rng.integers(0, VOCAB, length).tolist()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0)


def make(num_blocks: int, *plugins: object, windows: Any = (None,), max_num_seqs: int = 4) -> Engine:
    layers = simple_layers(6, num_kv_heads=1, head_dim=4, windows=windows)
    executor = SimulatedExecutor(layers, vocab_size=VOCAB, max_model_len=512, available_bytes=1 << 30)
    roles = {
        "cache": {"use": "paged", "block_size": 4, "num_blocks": num_blocks},
        "scheduler": {"use": "continuous", "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 4096},
    }
    engine = Engine({"model": "none", "plugins": roles}, [executor, IdTokenizer(VOCAB), *plugins])
    engine.parts.lifecycle.history.clock = lambda: 0.0  # what is done now and then would be done in some steps only
    return engine


def calls_of_a_step(engine: Engine) -> int:
    count = 0

    def look(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # whose callbacks would count
    sys.setprofile(look)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def stuck(waiting: int) -> Engine:
    """Runs one request that leaves too little memory to the first of those that wait."""
    engine = make(129)
    engine.add_request("running", prompt(301), greedy(200))
    engine.step()
    engine.add_request("head", prompt(300), greedy(2))
    for i in range(waiting):
        engine.add_request(f"wait{i}", prompt(10), greedy(2))
    engine.step()
    return engine


def taken(waiting: int) -> Engine:
    """Runs as many requests as may run at once."""
    engine = make(1025)
    for i in range(4 + waiting):
        engine.add_request(str(i), prompt(41), greedy(200))
    engine.step()
    engine.step()
    return engine


@pytest.mark.parametrize("fill", [stuck, taken])
def test_a_step_does_the_same_for_many_as_for_few_waiting_requests(fill: Any) -> None:
    few, many = fill(5), fill(500)
    assert [calls_of_a_step(few) for _ in range(8)] == [calls_of_a_step(many) for _ in range(8)]
    few.shutdown()
    many.shutdown()


def test_attempts_to_admit_compute_no_hash_twice_and_keep_the_order_of_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def sha256(data: bytes) -> Any:
        hashed.append(data)
        return real(data)

    real = hashing.sha256
    monkeypatch.setattr(hashing, "sha256", sha256)
    engine = stuck(3)
    wait = engine.explain("head")
    assert wait is not None
    assert wait.kind == "memory"
    before, free = len(hashed), engine.parts.cache.stats().free
    for _ in range(8):
        engine.step()
    assert len(hashed) - before == 2, "two blocks of the running request were completed"
    assert engine.parts.cache.stats().free == free - 2
    engine.shutdown()


def test_every_block_is_hashed_once_however_many_groups_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    real = hashing.sha256
    monkeypatch.setattr(hashing, "sha256", lambda data: hashed.append(data) or real(data))
    engine = make(1025, windows=[8, 8, None])
    assert len(engine.parts.layout.groups) > 1
    engine.add_request("a", prompt(41), greedy(43))
    while engine.has_work:
        engine.step()
    # 83 tokens were computed: 20 full blocks, and the root of the chain.
    assert len(hashed) == 21
    engine.shutdown()


class Listener:
    def __init__(self) -> None:
        self.stored: list[BlocksStored] = []

    @hookimpl
    def trivet_blocks_stored(self, event: BlocksStored) -> None:
        self.stored.append(event)


def test_an_event_tells_the_tokens_of_its_own_blocks() -> None:
    """Blocks that another request has made findable in the same step are left out, at the beginning too."""
    listener = Listener()
    engine = make(1025, listener)
    first = prompt(41)
    second = first[:12] + prompt(29)
    for name, tokens in (("first", first), ("second", second)):
        engine.add_request(name, tokens, greedy(1))
    while engine.has_work:
        engine.step()
    one, other = listener.stored
    assert (one.detail["parent"], one.detail["token_ids"]) == (None, first[:40])
    assert (other.detail["parent"], other.detail["token_ids"]) == (one.hashes[2], second[12:40])
    assert (len(one.hashes), len(other.hashes)) == (10, 7)
    engine.shutdown()
