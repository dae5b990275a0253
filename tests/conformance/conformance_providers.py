"""Small providers for roles and promises of which no bundled plugin has one."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from pydantic import Field

from trivet.errors import RequestError
from trivet.hookspecs import hookimpl
from trivet.ledger import BlockLedger
from trivet.plan import NewRequest
from trivet.provider import Provider
from trivet.roles import (
    Allocation,
    Cache,
    CacheHit,
    CacheRequirements,
    CacheStats,
    KVGroup,
    KVLayout,
    KVStorage,
    LogitsProcessor,
    SampleRows,
)
from trivet.sizing import choose_block_size, plan_blocks
from trivet_schemas.options import Options


def tokens_before(rows: SampleRows, row: int) -> list[int]:
    """The known tokens of a logits row's request and the drafts that lead to the row."""
    slot = int(rows.row_slots[row])
    sampling = int(np.searchsorted(rows.starts, row, side="right")) - 1
    drafts = rows.drafts.row(sampling).tolist()
    node = row - int(rows.starts[sampling]) - 1
    parents = rows.draft_parents.row(sampling).tolist() if rows.draft_parents else list(range(-1, len(drafts) - 1))
    path: list[int] = []
    while node >= 0:
        path.insert(0, drafts[node])
        node = parents[node]
    return [*rows.tokens[slot, : rows.lengths[slot]].tolist(), *path]


class NoRepeat(LogitsProcessor):
    """Forbids the last ``no_repeat`` tokens."""

    def __init__(self, context: Any, options: Any) -> None:
        self._window: dict[int, int] = {}

    def validate(self, params: Any) -> None:
        window = (params.extra_args or {}).get("no_repeat", 1)
        if type(window) is not int or window < 1:
            raise RequestError(f"extra_args.no_repeat: must be a positive integer, got {window!r}", param="extra_args")

    def add(self, request: NewRequest) -> bool:
        window = (request.params.extra_args or {}).get("no_repeat")
        if window is not None:
            self._window[request.slot] = window
        return window is not None

    def remove(self, slot: int) -> None:
        del self._window[slot]

    def apply(self, logits: Any, rows: SampleRows, selected: Any) -> Any:
        for row in np.asarray(selected).tolist():
            window = self._window[int(rows.row_slots[row])]
            logits[row, tokens_before(rows, row)[-window:]] = -np.inf
        return logits


class FlattenOptions(Options):
    factor: float = Field(2.0, gt=0)


class Flatten(LogitsProcessor):
    """Divides the logits of every request."""

    keeps_argmax = True

    def __init__(self, context: Any, options: FlattenOptions) -> None:
        self._factor = options.factor

    def add(self, request: NewRequest) -> bool:
        return True

    def remove(self, slot: int) -> None:
        pass

    def apply(self, logits: Any, rows: SampleRows, selected: Any) -> Any:
        logits[selected] /= self._factor
        return logits


class SharingCache(Cache):
    """Finds prefixes again, shares them, forks with copies on write; block by block from a queue."""

    can_fork = wants_commits = True

    def __init__(self, context: Any, options: Any) -> None:
        self._free: deque[int] = deque()
        self._known: dict[Any, int] = {}  # the tokens up to a block's end → the block
        self._content: dict[int, Any] = {}

    def configure(self, need: CacheRequirements) -> KVLayout:
        self._size = choose_block_size(4 if need.support[0].block_size_multiple == 1 else None, need.support)
        count = plan_blocks(need, self._size, memory=None, num_blocks=None)
        self._ledger = BlockLedger(count, need.max_num_seqs, -(-need.max_model_len // self._size))
        self._free = deque(range(1, count))
        layers = tuple(spec.layer for spec in need.specs)
        storage = tuple(KVStorage((layer,), count) for layer in layers)
        return KVLayout(need.specs, (KVGroup(0, layers, "full", self._size),), storage)

    def bind(self, context: Any) -> None:
        self._table = context.table

    def fits(self, num_tokens: int) -> bool:
        return -(-num_tokens // self._size) < self._ledger.num_blocks

    def key(self, request: Any, tokens: Any) -> Any:
        count = len(tokens)
        images = tuple((r.digest, r.offset, r.start, min(r.length, count - r.start)) for r in request.ranges)
        return tuple(sorted(request.cache_tags.items())), tokens.tobytes(), tuple(i for i in images if i[3] > 0)

    def admit(self, slot: int, request: Any) -> CacheHit:
        tokens, blocks = self._table.known_tokens(request), []
        if self._table.prompt_logprobs[slot]:
            return CacheHit()
        while (end := (len(blocks) + 1) * self._size) < len(tokens):
            block = self._known.get(self.key(request, tokens[:end]))
            if block is None:
                break
            if block in self._free:
                self._free.remove(block)
            blocks.append(block)
        self._ledger.append(slot, blocks)
        return CacheHit(len(blocks) * self._size)

    def take(self) -> int:
        block = self._free.popleft()
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        if block in self._content:
            del self._known[self._content.pop(block)]

    def extend(self, slots: Any, totals: Any, reserve: Any = None) -> Allocation:
        out_slots: list[int] = []
        out_blocks: list[int] = []
        kept = totals if reserve is None else reserve
        for row, (slot, total) in enumerate(zip(slots.tolist(), kept.tolist(), strict=True)):
            missing = max(-(-total // self._size) - int(self._ledger.length[slot]), 0)
            if missing > len(self._free):
                return Allocation(row, [out_slots], [out_blocks])
            blocks = [self.take() for _ in range(missing)]
            self._ledger.append(slot, blocks)
            out_slots += [slot] * len(blocks)
            out_blocks += blocks
        return Allocation(len(slots), [out_slots], [out_blocks])

    def commit(self, slots: Any, num_tokens: Any) -> None:
        for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True):
            self.remember(slot, count)

    def remember(self, slot: int, count: int) -> None:
        for index, block in enumerate(self._ledger.blocks(slot)[: count // self._size].tolist()):
            key = self.key(self._table.requests[slot], self._table.tokens[slot, : (index + 1) * self._size])
            if key not in self._known and block not in self._content:
                self._known[key], self._content[block] = block, key

    def fork(self, parent: int, child: int, num_tokens: int) -> Allocation | None:
        blocks = self._ledger.blocks(parent)[: -(-num_tokens // self._size)].tolist()
        copies = []
        if num_tokens % self._size:
            if not self._free:
                return None
            copies = [(blocks[-1], self.take())]
            blocks[-1] = copies[0][1]
        self._ledger.append(child, blocks)
        return Allocation(1, [[child] * len(blocks)], [blocks], copies=[copies])

    def tables(self, slot: int) -> list[Any]:
        return [self._ledger.blocks(slot)]

    def retire(self, slot: int) -> int:
        return self._ledger.retire(slot)

    def lease(self, blocks: Any) -> int:
        return self._ledger.lease(blocks[0].tolist())

    def settle(self, lease: int) -> None:
        self._free.extend(self._ledger.settle(lease))

    def invalidate(self, blocks: Any) -> list[tuple[int, int]]:
        for block in blocks[0].tolist():
            self.forget(block)
        found = []
        for slot in np.flatnonzero(self._ledger.length).tolist():
            bad = np.flatnonzero(np.isin(self._ledger.blocks(slot), blocks[0]))
            if len(bad):
                found.append((slot, int(bad[0]) * self._size))
        return found

    def reset(self) -> bool:
        if not self._ledger.idle:
            return False
        self._known.clear()
        self._content.clear()
        return True

    def stats(self) -> CacheStats:
        return self._ledger.stats()

    def check_integrity(self) -> None:
        self._ledger.check_integrity(list(self._free))


class WindowCache(Cache):
    """One group with a window, whose blocks are given back when they leave it; plain lists and counts."""

    wants_commits = True

    def __init__(self, context: Any, options: Any) -> None:
        self._tables: dict[int, list[int]] = {}
        self._leases: dict[int, tuple[bool, list[int]]] = {}
        self._count = 0

    def configure(self, need: CacheRequirements) -> KVLayout:
        self._size = choose_block_size(4 if need.support[0].block_size_multiple == 1 else None, need.support)
        self._window = need.specs[0].window or 0
        self._total = plan_blocks(need, self._size, memory=None, num_blocks=None)
        self._free = list(range(1, self._total))
        layers = tuple(spec.layer for spec in need.specs)
        group = KVGroup(0, layers, "sliding", self._size, self._window)
        return KVLayout(need.specs, (group,), (KVStorage(layers, self._total),))

    def fits(self, num_tokens: int) -> bool:
        return -(-num_tokens // self._size) < self._total

    def admit(self, slot: int, request: Any) -> CacheHit:
        self._tables[slot] = []
        return CacheHit()

    def extend(self, slots: Any, totals: Any, reserve: Any = None) -> Allocation:
        out_slots: list[int] = []
        out_blocks: list[int] = []
        for row, (slot, total) in enumerate(zip(slots.tolist(), totals.tolist(), strict=True)):
            missing = max(-(-total // self._size) - len(self._tables[slot]), 0)
            if missing > len(self._free):
                return Allocation(row, [out_slots], [out_blocks])
            blocks = [self._free.pop() for _ in range(missing)]
            self._tables[slot] += blocks
            out_slots += [slot] * missing
            out_blocks += blocks
        return Allocation(len(slots), [out_slots], [out_blocks])

    def commit(self, slots: Any, num_tokens: Any) -> None:
        for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True):
            table = self._tables[slot]
            for index in range(self.outside(count)):
                if table[index]:
                    block, table[index] = table[index], 0
                    self.give_back([block])

    def outside(self, count: int) -> int:
        """Blocks that the query at position ``count`` and those after it do not see."""
        return max(0, count - self._window + 1) // self._size

    def give_back(self, blocks: list[int]) -> None:
        leased = {b for _, kept in self._leases.values() for b in kept}
        self._free += [b for b in blocks if b and b not in leased and b not in self._free]

    def tables(self, slot: int) -> list[Any]:
        return [np.array(self._tables[slot], np.int32)]

    def retire(self, slot: int) -> int:
        return self._lease(True, self._tables.pop(slot))

    def lease(self, blocks: Any) -> int:
        return self._lease(False, blocks[0].tolist())

    def _lease(self, retired: bool, blocks: list[int]) -> int:
        self._count += 1
        self._leases[self._count] = retired, [b for b in blocks if b]
        return self._count

    def settle(self, lease: int) -> None:
        _, blocks = self._leases.pop(lease)
        live = {b for table in self._tables.values() for b in table}
        self.give_back([b for b in blocks if b not in live])

    def reset(self) -> bool:
        return not self._tables and not self._leases

    def stats(self) -> CacheStats:
        used = {b for table in self._tables.values() for b in table if b}
        retired = {b for kind, kept in self._leases.values() if kind for b in kept} - used
        leased = {b for kind, kept in self._leases.values() if not kind for b in kept} - used - retired
        total = self._total - 1
        return CacheStats(total, total - len(used | retired | leased), len(used), len(retired), len(leased))


@hookimpl
def trivet_providers() -> list[Provider]:
    here = "conformance_providers"
    return [
        Provider("cache", "sharing", f"{here}:SharingCache"),
        Provider("cache", "window", f"{here}:WindowCache"),
        Provider("logits_processor", "no_repeat", f"{here}:NoRepeat"),
        Provider("logits_processor", "flatten", f"{here}:Flatten", options=FlattenOptions),
    ]
