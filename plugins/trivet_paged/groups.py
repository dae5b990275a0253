"""Which layers share a block table, and which buffers their blocks lie in.

Layers that keep all tokens and layers that keep a window need different tables. Their blocks come from one pool all the
same: every group has (nearly) the same number of layers, and a block of any group is one page in each of as many
buffers, so a block that one group gives back can be taken by any other. This is the layout of vLLM's hybrid KV cache
manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TypeVar

from trivet.errors import CacheMemoryError
from trivet.plan import Int32
from trivet.roles import AttentionSupport, KVGroup, KVStorage, LayerKVSpec
from trivet.roles.kv import KVKind

_Count = TypeVar("_Count", int, Int32)

#: what one more group costs, as a share of the memory: tables, slot mappings and attention plans of every step
_GROUP_COST = 0.02


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group and the arithmetic of its window."""

    kv: KVGroup
    factor: int  #: its blocks in blocks of the smallest size

    @property
    def index(self) -> int:
        """Its number."""
        return self.kv.index

    @property
    def size(self) -> int:
        """Tokens per block."""
        return self.kv.block_size

    @property
    def windowed(self) -> bool:
        """Whether it gives blocks back while a request runs."""
        return self.kv.kind != "full"

    def first_block(self, num_tokens: _Count) -> _Count:
        """The first block that is read once ``num_tokens`` tokens are computed; also for many rows at once."""
        window = self.kv.window
        if not self.windowed or window is None:
            return num_tokens * 0
        if self.kv.kind == "chunked":
            return num_tokens // window * window // self.size
        return (num_tokens - window + 1) * (num_tokens >= window) // self.size

    def most_blocks(self, num_tokens: int, in_flight: int) -> int:
        """Blocks that a request of ``num_tokens`` tokens has at most at one time, computing ``in_flight`` at once."""
        all_of_them = -(-num_tokens // self.size)
        return min(all_of_them, self.span(in_flight)) if self.windowed else all_of_them

    def span(self, in_flight: int) -> int:
        """Blocks that a window and the tokens under way touch at most."""
        assert self.kv.window is not None
        return (self.kv.window - 1 + in_flight + self.size - 2) // self.size + 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups, their buffers (yet without a number of blocks), and bytes of a block over all buffers."""

    groups: tuple[Group, ...]
    buffers: tuple[tuple[int, ...], ...]
    page_bytes: int

    @property
    def alignment(self) -> int:
        """Tokens after which every group has full blocks."""
        return lcm(*(group.size for group in self.groups))

    def storage(self, num_blocks: int) -> tuple[KVStorage, ...]:
        """The buffers, with their size."""
        return tuple(KVStorage(layers, num_blocks) for layers in self.buffers)


def plan_groups(specs: Sequence[LayerKVSpec], support: Sequence[AttentionSupport], block_size: int) -> Plan:
    """Groups and buffers for layers. Raises CacheMemoryError for layers that keep something else than tokens."""
    kinds: dict[tuple[KVKind, int | None], list[LayerKVSpec]] = {}
    for spec in specs:
        if spec.kind == "recurrent":
            raise CacheMemoryError(
                f"layer {spec.layer} keeps a recurrent state, which the paged cache does not manage; select another "
                "cache plugin"
            )
        kinds.setdefault((spec.kind, spec.window), []).append(spec)
    if len(kinds) <= 1:
        kind, window = next(iter(kinds), ("full", None))
        layers = tuple(spec.layer for spec in specs)
        page = block_size * sum(spec.bytes_per_token for spec in specs)
        only = Group(KVGroup(0, layers, kind, block_size, window), 1)
        return Plan((only,), tuple((layer,) for layer in layers), page)
    allowed = {spec.layer: one for spec, one in zip(specs, support, strict=True)}
    widest = max(spec.bytes_per_token for spec in specs)
    count = _group_size([len(layers) for layers in kinds.values()])
    groups: list[Group] = []
    for (kind, window), members in kinds.items():
        factor = _factor(widest, members, [allowed[spec.layer] for spec in members], block_size)
        # Layers of one size side by side, so that a buffer has pages of one size where that is possible.
        members.sort(key=lambda spec: (-spec.bytes_per_token, spec.layer))
        for start in range(0, len(members), count):
            layers = tuple(spec.layer for spec in members[start : start + count])
            groups.append(Group(KVGroup(len(groups), layers, kind, block_size * factor, window), factor))
    sizes = {spec.layer: spec.bytes_per_token for spec in specs}
    buffers = tuple(tuple(g.kv.layers[i] for g in groups if i < len(g.kv.layers)) for i in range(count))
    tokens = {layer: g.size for g in groups for layer in g.kv.layers}
    page = sum(max(sizes[layer] * tokens[layer] for layer in layers) for layers in buffers)
    return Plan(tuple(groups), buffers, page)


def alike(groups: Sequence[Group]) -> list[list[Group]]:
    """Together those whose tables have entries, and null blocks, in the same places at all times."""
    together: dict[tuple[str, int | None, int], list[Group]] = {}
    for group in groups:
        together.setdefault((group.kv.kind, group.kv.window, group.size), []).append(group)
    return list(together.values())


def _group_size(counts: Sequence[int]) -> int:
    """Layers per group: as few groups as possible without leaving much memory unused in groups that are not full."""

    def cost(size: int) -> float:
        groups = sum(-(-count // size) for count in counts)
        return groups * size / sum(counts) + _GROUP_COST * groups

    return min(range(1, max(counts) + 1), key=cost)


def _factor(widest: int, members: Sequence[LayerKVSpec], allowed: Sequence[AttentionSupport], block_size: int) -> int:
    """How many times longer blocks of layers with fewer bytes per token are, so that they fill their pages."""
    factor, rest = divmod(widest, max(spec.bytes_per_token for spec in members))
    size = block_size * factor
    fits = all(
        size % one.block_size_multiple == 0 and (one.block_size_max is None or size <= one.block_size_max)
        for one in allowed
    )
    return factor if fits and not rest else 1
