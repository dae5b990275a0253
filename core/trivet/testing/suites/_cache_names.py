"""Names for what every cell of KV memory holds: a hash of the tokens before it, so equal names mean equal content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from trivet.roles import KVLayout
from trivet.state import PromptRange, Request

Cell = object


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group; groups that share a buffer have one ``pool``, so that a block id means the same memory."""

    index: int
    size: int
    kind: str
    window: int | None
    pool: int

    def first(self, num_tokens: int) -> int:
        """The first position that is read once ``num_tokens`` tokens are computed."""
        if self.window is None or self.kind == "full":
            return 0
        if self.kind == "chunked":
            return num_tokens // self.window * self.window
        return max(0, num_tokens - self.window + 1)


@dataclass(slots=True)
class Live:
    """A request with a table. ``names[p]`` is what the KV of position ``p`` must be."""

    request: Request
    names: list[Cell]
    computed: int = 0  #: cells that are written
    told: int = 0  #: tokens that ``commit`` was told of, or that were found
    loading: int = 0  #: loads under way


def pools_of(layout: KVLayout) -> list[Group]:
    """The layout's groups, with the buffer that each of them keeps its first layer in."""
    buffer = {layer: i for i, storage in enumerate(layout.storage) for layer in storage.layers}
    return [Group(g.index, g.block_size, g.kind, g.window, buffer[g.layers[0]]) for g in layout.groups]


def alignment(groups: Sequence[Group]) -> int:
    """Tokens after which every group has full blocks."""
    return lcm(*(group.size for group in groups))


@dataclass(slots=True)
class Namer:
    """Makes names, and remembers which one came before which."""

    before: dict[Cell, Cell] = field(default_factory=dict)

    def name(self, before: Cell, token: object) -> Cell:
        """What the KV of ``token`` after ``before`` is."""
        made = hash((before, token))
        self.before[made] = before
        return made

    def names(self, tokens: Sequence[int], tags: Mapping[str, bytes], ranges: Sequence[PromptRange] = ()) -> list[Cell]:
        """The name of every position of a request."""
        content: list[object] = list(tokens)
        for one in ranges:
            for i in range(one.length):
                content[one.start + i] = (tokens[one.start + i], one.digest, one.offset + i)
        names: list[Cell] = []
        for token in content:
            names.append(self.name(names[-1] if names else tuple(sorted(tags.items())), token))
        return names
