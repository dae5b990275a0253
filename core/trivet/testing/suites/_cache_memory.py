"""KV memory as a naive dictionary of cells, and what a cache's events say can be found in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from trivet.events import BlocksEvicted, BlocksStored
from trivet.roles import Cache, KVLayout
from trivet.testing.suites._base import require
from trivet.testing.suites._cache_names import Cell, Group, Namer, alignment, pools_of

Block = tuple[int, int]  #: (pool, block id)
_JUNK: Cell = "junk"


class Memory:
    """What every cell of every block holds. A cell of a KV group is (group, name): groups have different layers."""

    def __init__(self, layout: KVLayout) -> None:
        self.groups: list[Group] = pools_of(layout)
        self.alignment = alignment(self.groups)
        self.namer = Namer()
        self._blocks: dict[Block, list[Cell]] = {}
        self._sizes = {g.pool: max(o.size for o in self.groups if o.pool == g.pool) for g in self.groups}
        #: (group, name of a block's last cell) → the block, as the events tell
        self.findable: dict[tuple[int, Cell], Block] = {}
        self._named: dict[tuple[int, bytes], Cell] = {}  # (group, hash) → what it ever named
        self._listed: dict[tuple[int, bytes], Cell] = {}  # (group, hash) → what can be found now
        #: who holds a block, beside the one that writes
        self.holders: Callable[[Block, int], list[str]] = lambda _block, _slot: []

    # ------------------------------------------------------------------ cells

    def cells(self, block: Block) -> list[Cell]:
        """The cells of a block; None was never written."""
        return self._blocks.setdefault(block, [None] * self._sizes[block[0]])

    def forget(self) -> None:
        """Nobody may rely on anything."""
        self._blocks.clear()

    def spoil(self, block: Block) -> None:
        """Whatever was loaded is junk."""
        self._blocks[block] = [_JUNK] * self._sizes[block[0]]

    def zero(self, block: Block) -> None:
        """Fill with zeros."""
        self._blocks.pop(block, None)

    def copy(self, source: Block, target: Block, slot: int) -> None:
        """Copy on write, for a request in ``slot``."""
        self.may_be_written(target, slot)
        self._blocks[target] = list(self.cells(source))

    def write(self, block: Block, offset: int, cell: Cell, slot: int) -> None:
        """A request in ``slot`` (or nobody's load: -1) writes a cell."""
        self.may_be_written(block, slot)
        self.cells(block)[offset] = cell

    def may_be_written(self, block: Block, slot: int) -> None:
        """A block that others hold or that can be found is never written."""
        require(
            block[1] and block not in self.findable.values() and not self.holders(block, slot),
            "a block that others hold, or that can be found, is never written; nor is the null block",
            Cache,
            block=block[1],
            can_be_found=block in self.findable.values(),
            held_by=self.holders(block, slot) if block[1] else [],
        )

    def content(self, group: Group, block: Block) -> Cell:
        """The name of a whole block: that of its last cell. All of its cells must be written, one after the other."""
        cells = self.cells(block)[: group.size]
        names = [cell[1] if isinstance(cell, tuple) and cell[0] == group.index else None for cell in cells]
        whole = all(n is not None for n in names) and all(
            self.namer.before.get(after) == before for before, after in pairwise(names)
        )
        require(
            whole,
            "only blocks that are full of committed tokens can be found, or go to a tier",
            Cache.commit,
            block=block[1],
            cells=cells,
        )
        return names[-1]

    # ------------------------------------------------------------------ what can be found

    def replay(self, stored: Sequence[BlocksStored], evicted: Sequence[BlocksEvicted]) -> None:
        """Take over a cache's events, those about evicted blocks first."""
        for lost in evicted:
            if lost.cleared:
                self._listed = {key: name for key, name in self._listed.items() if key[0] != lost.group}
                self.findable = {key: block for key, block in self.findable.items() if key[0] != lost.group}
            for digest in lost.hashes:
                name = self._listed.pop((lost.group, digest), None)
                require(name is not None, "what is evicted could be found before", Cache.take_events, group=lost.group)
                del self.findable[lost.group, name]
        for found in stored:
            require(
                len(found.blocks) == len(found.hashes),
                "an event names every block",
                BlocksStored,
                blocks=found.blocks,
                hashes=found.hashes,
            )
            group = self.groups[found.group]
            for block, digest in zip(found.blocks, found.hashes, strict=True):
                place = (group.pool, block)
                name = self.content(group, place)
                require(
                    self._named.setdefault((group.index, digest), name) == name,
                    "equal hashes mean equal content",
                    BlocksStored,
                    block=block,
                )
                require(
                    (group.index, name) not in self.findable and place not in self.findable.values(),
                    "an event tells of what could not be found before",
                    Cache.take_events,
                    block=block,
                )
                self._listed[group.index, digest] = name
                self.findable[group.index, name] = place
        for (index, name), place in self.findable.items():
            require(
                self.content(self.groups[index], place) == name,
                "what can be found stays in its block",
                Cache.take_events,
                block=place[1],
            )

    def longest(self, names: Sequence[Cell], most: int, elsewhere: set[Cell]) -> int:
        """The longest beginning, in whole blocks of every group, whose cells are all findable or ``elsewhere``."""
        for length in range(most // self.alignment * self.alignment, 0, -self.alignment):
            if all(key in self.findable or key in elsewhere for key in self.needed(names, length)):
                return length
        return 0

    def needed(self, names: Sequence[Cell], length: int) -> list[tuple[int, Cell]]:
        """(group, name) of the blocks that a request needs whose first ``length`` tokens are found."""
        return [
            (g.index, names[(i + 1) * g.size - 1])
            for g in self.groups
            for i in range(g.first(length) // g.size, length // g.size)
        ]
