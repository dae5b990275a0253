"""The engine half of the tier: which content is in which place of host memory and disk."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trivet.errors import PluginError
from trivet.roles.cache_tier import CacheTier, TierLoad, TierStats, TierStore
from trivet_offload.fingerprint import check_root, digest, facts, folder, rank_folder
from trivet_offload.geometry import Geometry
from trivet_offload.payload import NONE, Moves, encode
from trivet_offload.segments import MAX_KEY, open_file, read_index
from trivet_offload.slots import SlotSpace

if TYPE_CHECKING:
    from trivet.context import EngineContext
    from trivet.plan import Transfer
    from trivet.roles import KVLayout
    from trivet_offload.options import OffloadOptions

_logger = logging.getLogger(__name__)


class OffloadTier(CacheTier):
    """Blocks that the cache evicts go to host memory; what host memory has no room for goes on to disk, if there is
    one. The policy of each decides what has to go.

    All places are given out here, so that every worker does the same. The workers name each place's content, and refuse
    a load whose key it is not: content that never arrived, for example because a step broke off, is a miss."""

    role: ClassVar[str] = "cache_tier"
    endpoint = "offload"

    def __init__(self, context: EngineContext | None, options: OffloadOptions) -> None:
        self._options = options
        self.persists = options.path is not None and options.persist
        self._folder: Path | None = None
        self._disk: SlotSpace | None = None
        self._generation = self._number = 0
        #: by payload
        self._under_way: dict[bytes, Moves] = {}
        #: keys that a load from disk puts into host memory too, which does not have them yet
        self._arriving: set[bytes] = set()
        self._stored = self._loaded = self._dropped = self._refused = self._store_bytes = self._load_bytes = 0

    def check(self, context: EngineContext, layout: KVLayout) -> None:
        if sum(tier.endpoint == self.endpoint for tier in context.all("cache_tier")) > 1:
            raise PluginError("plugins.cache_tier: 'offload' is named twice; name it once, with all of its memory")
        options = self._options
        geometry = Geometry.of(layout)
        geometry.host_slots(options)
        try:
            context.component("tier_policy", options.policy, capacity=1)
        except PluginError as exc:
            raise PluginError(f"plugins.cache_tier.offload.policy: {exc}") from exc
        if options.path is not None:
            geometry.segments(options)
            check_root(options.path)

    def bind(self, context: EngineContext) -> None:
        options = self._options
        geometry = Geometry.of(context.layout)
        slots = geometry.host_slots(options)
        self._sizes = geometry.group_bytes
        self._host = SlotSpace(slots, context.component("tier_policy", options.policy, capacity=slots))
        if options.path is not None:
            self._bind_disk(context, geometry, options.path)
        # Elsewhere the copies are queued on the device, and nobody must wait for them.
        self._blocking = context.info.device.partition(":")[0] != "cuda"

    def _bind_disk(self, context: EngineContext, geometry: Geometry, path: str) -> None:
        """Find what the first worker has on disk; the others have the same, or their loads will fail."""
        fingerprint = digest(facts(context, context.layout, context.info.device, self._options))
        self._folder = folder(path, fingerprint)
        self._generation = _read_generation(self._folder)
        plan = geometry.segments(self._options)
        policy = context.component("tier_policy", self._options.policy, capacity=plan.num_slots)
        self._disk = SlotSpace(plan.num_slots, policy)
        self._disk.place(read_index(rank_folder(self._folder, 0), plan, fingerprint, self._generation))

    # ------------------------------------------------------------------ what the cache asks

    def holds(self, key: bytes) -> bool:
        return key in self._host or (self._disk is not None and key in self._disk)

    def store(self, keys: Sequence[bytes]) -> TierStore:
        moves = self._begin()
        taken: list[bool] = []
        for key in keys:
            held = self.holds(key)
            taken.append(not held and self._place(key, moves))
            if taken[-1]:
                moves.host.append(self._host.slot(key))
            elif not held:
                self._refuse()
        return TierStore(taken, self._send(moves) if any(taken) else b"")

    def load(self, keys: Sequence[bytes]) -> TierLoad:
        moves = self._begin()
        # All are pinned before room is made for any of them.
        for key in keys:
            if key in self._host and key not in self._arriving:
                self._host.use(key)
                moves.host.append(self._host.pin(key))
                moves.disk.append(NONE)
            else:
                assert self._disk is not None, "a key is loaded that the tier does not hold"
                self._disk.use(key)
                moves.host.append(NONE)
                moves.disk.append(self._disk.pin(key))
        for key, slot in zip(keys, moves.disk, strict=True):
            arrives = slot != NONE and key not in self._host and self._place(key, moves)
            moves.promote.append(self._host.slot(key) if arrives else NONE)
            if arrives:
                self._arriving.add(key)
        blocking = self._blocking and all(slot == NONE for slot in moves.disk)
        return TierLoad(blocking, self._send(moves))

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            for space in (self._host, self._disk):
                if space is not None and key in space:
                    space.use(key)

    def settled(self, transfer: Transfer, *, store: bool, ok: bool) -> None:
        moves = self._under_way.pop(transfer.payload, None)
        if moves is None:
            return  # it was under way at a reset
        keys = [key for key in transfer.keys if key]
        if store:
            self._stored_now(keys, moves, ok=ok)
        else:
            self._loaded_now(keys, moves, ok=ok)
        if not ok and (store or transfer.transfer_id < 0):
            self._undo(moves)
        if ok:
            count = sum(
                size * int((blocks > 0).sum()) for size, blocks in zip(self._sizes, transfer.blocks, strict=True)
            )
            self._store_bytes += count if store else 0
            self._load_bytes += 0 if store else count
        self._host.unpin(slot for slot in (*moves.host, *moves.promote) if slot != NONE)
        if self._disk is not None:
            self._disk.unpin([slot for slot in moves.disk if slot != NONE] + [slot for _, slot in moves.demote])

    def _stored_now(self, keys: Sequence[bytes], moves: Moves, *, ok: bool) -> None:
        if ok:
            self._stored += len(keys)
            return
        for key, slot in zip(keys, moves.host, strict=True):
            if self._host.key(slot) == key:
                self._forget(key)

    def _undo(self, moves: Moves) -> None:
        """Nothing of this reached the workers, so the old content of host slots is not on disk."""
        for _, slot in moves.demote:
            assert self._disk is not None
            lost = self._disk.key(slot)
            if lost is not None:
                self._forget(lost)

    def _loaded_now(self, keys: Sequence[bytes], moves: Moves, *, ok: bool) -> None:
        if ok:
            self._loaded += len(keys)
        for key, slot in zip(keys, moves.promote, strict=True):
            if slot != NONE and self._host.key(slot) == key:
                self._arriving.discard(key)
                if not ok:
                    self._host.drop(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        self._arriving.discard(key)
        lost = self._host.drop(key)
        if self._disk is not None:
            lost = self._disk.drop(key) or lost
        self._dropped += lost

    def reset(self) -> None:
        self._generation += 1
        self._under_way.clear()
        self._arriving.clear()
        self._host.clear()
        if self._disk is not None:
            assert self._folder is not None
            self._disk.clear()
            _write_generation(self._folder, self._generation)

    def _refuse(self) -> None:
        """A block is lost because every place in host memory is being written or read."""
        if not self._refused:
            _logger.warning(
                "plugins.cache_tier: one step evicts more than the host memory of 'offload' holds (%d blocks), and the "
                "rest is dropped; raise its host_memory",
                self._host.capacity,
            )
        self._refused += 1

    # ------------------------------------------------------------------ places

    def _begin(self) -> Moves:
        self._number += 1
        return Moves(self._number, self._generation, [], [], [], [])

    def _send(self, moves: Moves) -> bytes:
        payload = encode(moves)
        self._under_way[payload] = moves
        return payload

    def _place(self, key: bytes, moves: Moves) -> bool:
        """Give ``key`` a place in host memory, and pin it; whose place it was goes to disk. False if all are in use."""
        found = self._host.take(key)
        if found is None:
            return False
        slot, victim = found
        self._host.pin(key)
        if victim is not None:
            self._demote(victim, slot, moves)
        return True

    def _demote(self, key: bytes, slot: int, moves: Moves) -> None:
        disk = self._disk
        if disk is None or len(key) > MAX_KEY:
            self._dropped += 1
        elif key in disk:
            disk.use(key)
        elif (found := disk.take(key)) is None:
            self._dropped += 1
        else:
            place, victim = found
            disk.pin(key)
            moves.demote.append((slot, place))
            self._dropped += victim is not None and victim not in self._host

    # ------------------------------------------------------------------ figures

    def stats(self) -> TierStats:
        disk = self._disk
        only_disk = 0 if disk is None else len(disk) - sum(key in disk for key in self._host)
        return TierStats(
            self.endpoint,
            capacity=self._host.capacity + (0 if disk is None else disk.capacity),
            held=len(self._host) + only_disk,
            stored=self._stored,
            loaded=self._loaded,
            dropped=self._dropped,
            refused=self._refused,
            store_bytes=self._store_bytes,
            load_bytes=self._load_bytes,
        )

    def check_integrity(self) -> None:
        """Every pin belongs to a transfer under way, and places add up."""
        self._host.check_integrity()
        host = [slot for moves in self._under_way.values() for slot in (*moves.host, *moves.promote) if slot != NONE]
        assert sorted(host) == self._host.pins(), "pins in host memory belong to no transfer"
        if self._disk is None:
            return
        self._disk.check_integrity()
        disk = [slot for moves in self._under_way.values() for slot in moves.disk if slot != NONE]
        disk += [slot for moves in self._under_way.values() for _, slot in moves.demote]
        assert sorted(disk) == self._disk.pins(), "pins on disk belong to no transfer"
        assert all(key in self._host for key in self._arriving), "a key arrives nowhere"


def _read_generation(where: Path) -> int:
    """The number of resets that the content of a folder has seen."""
    try:
        with os.fdopen(open_file(where / "generation", os.O_RDONLY), encoding="ascii") as file:
            number = int(file.read(32))
        problem: object = None if 0 <= number < 2**31 else f"{number} is out of range"
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as exc:
        problem = exc
    if problem is None:
        return number
    _logger.warning("%s: blocks on disk are not used: %s", where / "generation", problem)
    return time.time_ns() // 10**9  # one that no content has


def _write_generation(where: Path, generation: int) -> None:
    """So that content from before a reset is not found after a restart either."""
    try:
        fresh = where / "generation.new"
        fresh.unlink(missing_ok=True)
        fresh.write_text(str(generation), encoding="ascii")
        fresh.replace(where / "generation")
    except OSError as exc:
        _logger.critical("delete %s, or blocks from before the reset will be found after a restart: %s", where, exc)
