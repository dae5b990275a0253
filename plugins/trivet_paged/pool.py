"""Free blocks and what they still hold: which block comes next, and where content is found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from trivet.events import BlocksEvicted, BlocksStored


class BlockPool:
    """Blocks that nobody needs, in the order of reuse, and the index of content by digest, one per KV group.

    A free block without findable content is reused first; those with content follow in the order in which they became
    free (least recently used first), in a linked list: taking, giving back and taking from the middle are O(1)."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_blocks = num_blocks
        #: the lowest ids on top: memory that was never used stays untouched as long as possible
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # Two lists, not one of tuples: the garbage collector would go through those, block by block.
        self._digests: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks  # of which group a digest is
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._blank) + len(self._kept)

    def free_blocks(self) -> list[int]:
        """All of them."""
        return [*self._blank, *self._kept]

    def kept(self) -> Iterator[tuple[int, bytes, int]]:
        """Free blocks with content, the latest first, as (group, digest, block)."""
        for block in reversed(self._kept):
            digest = self._digests[block]
            assert digest is not None
            yield self._groups[block], digest, block

    def take(self, count: int, evicted: list[tuple[int, bytes, int]]) -> list[int]:
        """``count`` ≤ :attr:`num_free` blocks; whose content is lost by that goes to ``evicted`` as (group, digest,
        block)."""
        blank = self._blank
        split = max(len(blank) - count, 0)
        taken = blank[split:]
        del blank[split:]
        taken.reverse()
        for _ in range(count - len(taken)):
            block, _ = self._kept.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None
            evicted.append((self._unname(block, digest), digest, block))
            taken.append(block)
        return taken

    def claim(self, blocks: Iterable[int]) -> None:
        """Free blocks with content are used again."""
        for block in blocks:
            del self._kept[block]

    def give(self, blocks: Sequence[int]) -> None:
        """Nobody needs these blocks any more; the first of them is reused first."""
        digests, kept, blank = self._digests, self._kept, self._blank
        for block in blocks:
            if digests[block] is None:
                blank.append(block)
            else:
                kept[block] = None

    def name(self, group: int, digests: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """The blocks' content can be found from now on, unless other blocks hold the same; null blocks have none.
        Returns the places in the lists of those that can be found now and could not before."""
        index, have, groups = self.index[group], self._digests, self._groups
        named: list[int] = []
        for place, (digest, block) in enumerate(zip(digests, blocks, strict=True)):
            if block and have[block] is None and digest not in index:
                index[digest] = block
                have[block] = digest
                groups[block] = group
                named.append(place)
        return named

    def forget(self, block: int) -> tuple[int, bytes] | None:
        """The block's content must not be found any more; returns what it was."""
        digest = self._digests[block]
        if digest is None:
            return None
        group = self._unname(block, digest)
        if block in self._kept:
            del self._kept[block]
            self._blank.append(block)
        return group, digest

    def clear(self) -> None:
        """Nothing can be found any more."""
        self._blank += reversed(self._kept)
        self._kept.clear()
        for index in self.index:
            index.clear()
        self._digests = [None] * self.num_blocks

    def _unname(self, block: int, digest: bytes) -> int:
        group = self._groups[block]
        del self.index[group][digest]
        self._digests[block] = None
        self.num_evicted += 1
        return group

    def check_integrity(self) -> None:
        """Index and names agree, and only blocks with content are kept for it."""
        found = {block: (g, digest) for g, index in enumerate(self.index) for digest, block in index.items()}
        named = {
            block: (self._groups[block], digest) for block, digest in enumerate(self._digests) if digest is not None
        }
        assert found == named, "index and names of blocks disagree"
        assert all(self._digests[block] is not None for block in self._kept), "a block is kept for nothing"
        assert all(self._digests[block] is None for block in self._blank), "content is among the blank blocks"


class EventLog:
    """What became findable and what no longer is, since the last time anybody asked."""

    def __init__(self) -> None:
        self._stored: list[BlocksStored] = []
        self._evicted: dict[int, list[bytes]] = {}
        self._cleared: list[BlocksEvicted] = []

    def stored(self, event: BlocksStored) -> None:
        """Blocks became findable. What was evicted before them is told before them."""
        self._stored.append(event)

    def evicted(self, group: int, digest: bytes) -> None:
        """A block's content was lost."""
        for place, event in enumerate(self._stored):
            if event.group == group and digest in event.hashes:
                # Nobody has been told of it yet: what is told is the blocks before it and those behind it.
                self._stored[place : place + 1] = _without(event, event.hashes.index(digest))
                return
        self._evicted.setdefault(group, []).append(digest)

    def cleared(self, num_groups: int) -> None:
        """Everything was forgotten."""
        self._stored.clear()
        self._evicted.clear()
        self._cleared = [BlocksEvicted(group, [], cleared=True) for group in range(num_groups)]

    def take(self) -> tuple[list[BlocksStored], list[BlocksEvicted]]:
        """All of it, once."""
        stored, self._stored = self._stored, []
        lost = self._cleared + [BlocksEvicted(group, digests) for group, digests in self._evicted.items()]
        self._cleared, self._evicted = [], {}
        return stored, lost


def _without(event: BlocksStored, at: int) -> list[BlocksStored]:
    """The event without its block ``at``."""
    rest: list[BlocksStored] = []
    for start, stop, parent in ((0, at, event.detail.get("parent")), (at + 1, len(event.blocks), event.hashes[at])):
        if start < stop:
            detail = dict(event.detail)
            if "token_ids" in detail:
                size = detail["block_size"]
                detail |= {"parent": parent, "token_ids": detail["token_ids"][start * size : stop * size]}
            rest.append(BlocksStored(event.group, event.blocks[start:stop], event.hashes[start:stop], detail))
    return rest
