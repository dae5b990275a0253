"""The engine half against workers that are dictionaries: what is said to be there is there when a load comes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import offload_kit as kit
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trivet.errors import PluginError, TrivetError
from trivet.plan import Transfer
from trivet_offload.payload import NONE, Moves, decode
from trivet_offload.tier import OffloadTier

LAYOUT = kit.make_layout()


def make_tier(slots: int, disk: int, path: Path, policy: str = "lru") -> OffloadTier:
    chosen = kit.options(slots, LAYOUT, disk=disk, path=path if disk else None, policy=policy)
    tier = OffloadTier(None, chosen)
    tier.bind(kit.context(LAYOUT, tier))
    assert tier.stats().capacity == slots + disk
    return tier


class DictWorker:
    """Rows and places that hold keys. Memory is copied when a transfer is submitted; the disk does one job at a time,
    later."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, bytes]] = {}
        self.places: dict[int, tuple[int, bytes]] = {}
        self.jobs: list[Any] = []

    def demote(self, moves: Moves, *, lose: bool) -> None:
        for row, place in moves.demote:
            content = self.rows.get(row)
            if content is not None and not lose:
                self.jobs.append(lambda place=place, content=content: self.places.__setitem__(place, content))

    def store(self, keys: list[bytes], moves: Moves, *, lose: bool = False) -> None:
        self.demote(moves, lose=lose)
        for key, row in zip(keys, moves.host, strict=True):
            self.rows[row] = moves.generation, key

    def load(self, keys: list[bytes], moves: Moves, end: Any, *, lose: bool = False) -> None:
        """Calls ``end(bad keys)`` when all have been read."""
        self.demote(moves, lose=lose)
        for row in moves.promote:
            self.rows.pop(row, None)
        bad = [
            key
            for key, row in zip(keys, moves.host, strict=True)
            if row != NONE and self.rows.get(row) != (moves.generation, key)
        ]
        if all(place == NONE for place in moves.disk):
            end(bad)
            return

        def read() -> None:
            for key, place, row in zip(keys, moves.disk, moves.promote, strict=True):
                if place == NONE:
                    continue
                if self.places.get(place) != (moves.generation, key):
                    bad.append(key)
                elif row != NONE:
                    self.rows[row] = moves.generation, key
            end(bad)

        self.jobs.append(read)


class Life:
    """Plans as the core makes them: claims of loads and offers of stores in any order, stores submitted first, ends
    reported some plans later."""

    def __init__(self, tier: OffloadTier, seed: int, *, faults: bool) -> None:
        self.tier, self.rng, self.faults = tier, random.Random(seed), faults
        self.worker = DictWorker()
        self.ended: list[Any] = []
        self.loaded = self.missed = self.under_way = 0

    def plan(self, operations: list[tuple[str, list[int]]]) -> None:
        stores: list[Transfer] = []
        loads: list[Transfer] = []
        for what, numbers in operations:
            keys = [b"key %d" % number for number in dict.fromkeys(numbers)]
            if what == "store":
                self.tier.touch([key for key in keys if self.tier.holds(key)])
                keys = [key for key in keys if not self.tier.holds(key)]
                choice = self.tier.store(keys)
                taken = [key for key, chosen in zip(keys, choice.taken, strict=True) if chosen]
                if taken:
                    assert all(self.tier.holds(key) for key in taken)
                    stores.append(self.transfer(taken, choice.payload))
            elif what == "load":
                keys = [key for key in keys if self.tier.holds(key)]
                if keys:
                    how = self.tier.load(keys)
                    assert all(self.tier.holds(key) for key in keys)
                    loads.append(self.transfer(keys, how.payload, how.blocking))
            elif what == "forget":
                self.tier.forget(keys[:1])
                assert not self.tier.holds(keys[0])
            elif what == "reset" and not self.under_way and not stores and not loads:
                self.tier.reset()
                assert not any(self.tier.holds(b"key %d" % number) for number in range(30))
            self.tier.check_integrity()
        self.run(stores, loads)

    def transfer(self, keys: list[bytes], payload: bytes, blocking: bool = True) -> Transfer:
        self.under_way += 1
        return Transfer(0, "offload", 0, 0, 0, 0, [kit.np.ones(len(keys), kit.np.int32)], keys, blocking, payload)

    def run(self, stores: list[Transfer], loads: list[Transfer]) -> None:
        lose = self.faults and self.rng.random() < 0.1
        for transfer in stores:
            if self.faults and self.rng.random() < 0.1:
                self.ended.append(lambda transfer=transfer: self.settle(transfer, store=True, ok=False))
                continue
            self.worker.store(transfer.keys, decode(transfer.payload), lose=lose)
            self.ended.append(lambda transfer=transfer: self.settle(transfer, store=True, ok=True))
        for transfer in loads:

            def end(bad: list[bytes], transfer: Transfer = transfer) -> None:
                self.ended.append(lambda: self.loads_end(transfer, bad))

            if self.faults and self.rng.random() < 0.05:
                end(list(transfer.keys))
            else:
                self.worker.load(transfer.keys, decode(transfer.payload), end, lose=lose)
        for _ in range(self.rng.randrange(4)):
            if self.worker.jobs:
                self.worker.jobs.pop(0)()
        for _ in range(self.rng.randrange(4)):
            if self.ended:
                self.ended.pop(self.rng.randrange(len(self.ended)))()

    def loads_end(self, transfer: Transfer, bad: list[bytes]) -> None:
        assert self.faults or not bad, f"{bad} were said to be there"
        self.loaded += len(transfer.keys) - len(bad)
        self.missed += len(bad)
        self.tier.forget(bad)
        self.settle(transfer, store=False, ok=not bad)

    def settle(self, transfer: Transfer, *, store: bool, ok: bool) -> None:
        self.under_way -= 1
        self.tier.settled(transfer, store=store, ok=ok)
        self.tier.check_integrity()

    def drain(self) -> None:
        while self.worker.jobs or self.ended:
            self.run([], [])
        assert not self.under_way
        assert not self.tier._host.pins()


numbers = st.lists(st.integers(0, 25), min_size=1, max_size=6)
operations = st.tuples(st.sampled_from(["store", "store", "load", "load", "forget", "reset"]), numbers)
lives = st.lists(st.lists(operations, min_size=1, max_size=4), min_size=1, max_size=25)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("faults", [False, True])
@given(slots=st.integers(1, 8), disk=st.integers(0, 9), seed=st.integers(0, 1 << 16), plans=lives)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_it_holds_can_be_loaded(
    tmp_path: Path, policy: str, faults: bool, slots: int, disk: int, seed: int, plans: Any
) -> None:
    life = Life(make_tier(slots, disk, tmp_path, policy), seed, faults=faults)
    for plan in plans:
        life.plan(plan)
    life.drain()


def test_a_long_life_loads_from_memory_and_disk(tmp_path: Path) -> None:
    rng = random.Random(3)
    life = Life(make_tier(10, 20, tmp_path, "arc"), 3, faults=True)
    for _ in range(3000):
        kinds = rng.choices(["store", "load", "forget"], [5, 5, 1], k=rng.randint(1, 3))
        life.plan([(kind, [rng.randrange(50) for _ in range(rng.randint(1, 5))]) for kind in kinds])
    life.drain()
    stats = life.tier.stats()
    assert life.loaded > 3000
    assert stats.held <= stats.capacity == 30
    assert stats.dropped > 1000
    assert 0 < life.missed < life.loaded / 3


def test_what_is_about_to_be_loaded_makes_no_room_for_what_is_evicted(tmp_path: Path) -> None:
    tier = make_tier(2, 0, tmp_path)
    tier.store([b"a", b"b"])
    settle_all(tier)
    tier.load([b"a", b"b"])
    assert tier.store([b"c"]).taken == [False]
    assert tier.holds(b"a")
    assert tier.holds(b"b")
    settle_all(tier)
    assert tier.store([b"c"]).taken == [True]
    assert not tier.holds(b"a"), "the least recently used one goes"


def test_what_memory_has_no_room_for_goes_to_disk_and_comes_back_into_memory(tmp_path: Path) -> None:
    tier = make_tier(2, 4, tmp_path)
    for key in (b"a", b"b", b"c"):
        tier.store([key])
        settle_all(tier)
    assert [tier.holds(key) for key in (b"a", b"b", b"c")] == [True] * 3
    assert tier.stats().held == 3
    assert tier.load([b"c"]).blocking, "from memory it comes within the step"
    from_disk = tier.load([b"a"])
    assert not from_disk.blocking
    moves = decode(from_disk.payload)
    assert moves.host == [NONE]
    assert moves.promote[0] >= 0
    assert len(moves.demote) == 1, "b makes room"
    assert not tier.load([b"a"]).blocking, "it has not arrived yet"
    settle_all(tier)
    assert tier.load([b"a"]).blocking
    assert tier.stats().held == 3
    settle_all(tier)


def test_a_block_that_could_not_be_stored_is_not_there(tmp_path: Path) -> None:
    tier = make_tier(1, 4, tmp_path)
    tier.store([b"a"])
    settle_all(tier)
    tier.store([b"b"])
    settle_all(tier, ok=False)
    assert not tier.holds(b"b")
    assert not tier.holds(b"a"), "whether it reached the disk is not known"
    assert tier.store([b"c"]).taken == [True]
    settle_all(tier)


def test_keys_too_long_for_the_disk_stay_in_memory(tmp_path: Path) -> None:
    tier = make_tier(1, 4, tmp_path)
    tier.store([b"k" * 100])
    settle_all(tier)
    assert tier.holds(b"k" * 100)
    tier.store([b"short"])
    settle_all(tier)
    assert not tier.holds(b"k" * 100)
    assert tier.stats().dropped == 1


def test_figures_count_blocks_and_bytes(tmp_path: Path) -> None:
    tier = make_tier(3, 0, tmp_path)
    size = kit.make_layout().specs[0].bytes_per_token * 4
    tier.store([b"a", b"b", b"c"])
    settle_all(tier)
    tier.load([b"a", b"b"])
    settle_all(tier)
    tier.store([b"d"])
    settle_all(tier)
    tier.forget([b"d", b"unknown"])
    stats = tier.stats()
    assert (stats.name, stats.capacity, stats.held) == ("offload", 3, 2)
    assert (stats.stored, stats.loaded, stats.dropped) == (4, 2, 2)
    assert (stats.store_bytes, stats.load_bytes) == (4 * size, 2 * size)


def test_a_memory_smaller_than_a_block_is_refused_with_the_size_of_a_block() -> None:
    with pytest.raises(TrivetError, match=r"host_memory: 100B is less than one block .* has 192B; set it to"):
        OffloadTier(None, kit.OffloadOptions(host_memory=100)).bind(kit.context(LAYOUT))


def test_a_disk_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    chosen = kit.OffloadOptions(path=str(tmp_path), disk_memory=5000)
    with pytest.raises(TrivetError, match=r"disk_memory: .* is less than one block .* takes on disk"):
        OffloadTier(None, chosen).bind(kit.context(LAYOUT))


def test_it_is_named_once() -> None:
    chosen = kit.OffloadOptions()
    tier = OffloadTier(None, chosen)
    context = kit.context(LAYOUT)
    context.all = lambda role: [tier, OffloadTier(None, chosen)]
    with pytest.raises(PluginError, match="'offload' is named twice"):
        tier.check(context, LAYOUT)


def test_on_an_accelerator_every_load_holds_its_request() -> None:
    tier = OffloadTier(None, kit.OffloadOptions(host_memory=1000))
    tier.bind(kit.context(LAYOUT, tier, device="cuda:1"))
    tier.store([b"a"])
    assert not tier.load([b"a"]).blocking


def settle_all(tier: OffloadTier, *, ok: bool = True) -> None:
    """End everything that is under way, in the order in which it began."""
    for payload, moves in list(tier._under_way.items()):
        store = not moves.disk and not moves.promote
        space = tier._host
        keys = [space.key(row) or b"gone" for row in moves.host if row != NONE]
        if not store:
            assert tier._disk is not None or NONE not in moves.host
            keys = [
                (space.key(row) if row != NONE else tier._disk.key(place)) or b"gone"  # type: ignore[union-attr]
                for row, place in zip(moves.host, moves.disk, strict=True)
            ]
        blocks = [kit.np.ones(len(keys), kit.np.int32)]
        tier.settled(Transfer(0, "offload", 0, 0, 0, 0, blocks, keys, True, payload), store=store, ok=ok)
    tier.check_integrity()
