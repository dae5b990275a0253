"""Role ``cache``: which blocks hold which tokens. Block ids only, no tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from trivet.plan import Int32, Transfer
from trivet.roles.base import Role
from trivet.roles.kv import AttentionSupport, KVLayout, LayerKVSpec

if TYPE_CHECKING:
    from trivet.context import EngineContext
    from trivet.events import BlocksEvicted, BlocksStored
    from trivet.state import Request


@dataclass(frozen=True, slots=True)
class CacheRequirements:
    """What the cache has to serve, from the model, the attention provider and the scheduler."""

    specs: tuple[LayerKVSpec, ...]
    support: tuple[AttentionSupport, ...]  #: one per spec
    available_bytes: int  #: memory left for the cache when the options name no size
    max_model_len: int
    max_num_seqs: int
    max_tokens_in_flight: int = 2048  #: most tokens of one request that steps under way compute at once


@dataclass(slots=True)
class CacheHit:
    """What admission found in the cache: ``num_tokens`` are covered by blocks already in the slot's table.

    ``loads`` bring further blocks (also already in the table, and counted in ``num_tokens``) from a tier; a load
    that is not ``blocking`` holds the request until it is reported. A load's blocks are a stretch of the table per
    group, with the null block (and an empty key) where nothing has to be loaded.
    """

    num_tokens: int = 0
    loads: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class Allocation:
    """What :meth:`Cache.extend` did: the first ``rows`` rows have their blocks, the rest do not (memory is short).

    ``slots[g]`` and ``blocks[g]`` list, per KV group, one entry per appended block, in row order.
    ``copies[g]`` are ``(source, destination)`` pairs (copy on write), ``zeroing[g]`` block ids.
    """

    rows: int
    slots: list[list[int]]
    blocks: list[list[int]]
    copies: list[list[tuple[int, int]]] | None = None
    zeroing: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks by state (a block has the first that applies: used by a live table, retired, leased, free)."""

    total: int  #: usable blocks: the null block is not counted
    free: int
    used: int
    retired: int
    leased: int
    prefix_queries: int = 0  #: tokens looked up, at admissions
    prefix_hits: int = 0  #: tokens found, those of tiers included
    tier_hits: int = 0  #: tokens found in tiers, and loaded
    evicted: int = 0  #: blocks whose content was forgotten to make room, whether a tier took it or not


class Cache(Role):
    """Block tables of running requests.

    Tables are append-only: an entry never changes, except to the null block 0 when it leaves a group's window. All
    methods run on the engine's thread. ``slot`` is a row of the request table; a slot has a table from
    :meth:`admit` to
    :meth:`retire`.
    """

    role: ClassVar[str] = "cache"
    #: whether :meth:`fork` works; without it children compute their prompt themselves
    can_fork: bool = False
    #: whether the engine calls :meth:`commit` (costs time per step)
    wants_commits: bool = False
    #: whether the engine calls :meth:`take_events`
    has_events: bool = False
    #: set by the engine before the first step: whether anybody listens to what :meth:`take_events` tells
    observed: bool = False

    @abstractmethod
    def configure(self, need: CacheRequirements) -> KVLayout:
        """Decide groups and sizes. Raises :class:`trivet.errors.CacheMemoryError` when not even one request of
        the maximum length fits, naming the sizes and the settings that would help."""

    def bind(self, context: EngineContext) -> None:
        """Called once after :meth:`configure`; ``context.table`` holds token ids and columns for hashing."""

    @abstractmethod
    def fits(self, num_tokens: int) -> bool:
        """Whether a request that grows to ``num_tokens`` can run when it has the cache to itself."""

    def request_blocks(self, num_tokens: int) -> int | None:
        """Blocks that a request which grows to ``num_tokens`` has at most at one time, over all groups; None where that
        depends on more than its length. For plans of memory, after :meth:`configure`."""
        return None

    @abstractmethod
    def admit(self, slot: int, request: Request) -> CacheHit:
        """Give ``slot`` a table, with whatever blocks are found for the request's known tokens. At least the
        last known token is never counted as found, and nothing is for a request with ``prompt_logprobs``, whose
        prompt must be computed. Must not fail for lack of memory: the table may be empty.

        A cache may hold the request (``context.hold``) instead of admitting it, for example while others compute
        what it could share; it is then given back its slot, and tried again once the cache has released it."""

    @abstractmethod
    def extend(self, slots: Int32, totals: Int32, reserve: Int32 | None = None) -> Allocation:
        """Make sure that row ``i``'s table covers ``totals[i]`` tokens, row by row in order, stopping at the
        first row for which memory is short (that row and later ones are left as they were).

        ``reserve[i]`` ≥ ``totals[i]`` tokens are known and will be computed in later steps: groups that keep every
        token take the blocks for them now, so that a prompt once begun is not thrown back half-way; groups with a
        window need not, as they give blocks back while the request goes on."""

    def commit(self, slots: Int32, num_tokens: Int32) -> None:
        """The KV of the first ``num_tokens[i]`` tokens of ``slots[i]`` is final and the tokens are committed: full
        blocks may be hashed, blocks outside a window released. Called when :attr:`wants_commits` is set."""

    def fork(self, parent: int, child: int, num_tokens: int) -> Allocation | None:
        """Give ``child`` a table that shares the parent's blocks for the first ``num_tokens`` tokens, with copies of
        a last block that is partly filled. None, and no table, when that cannot be done (memory is short, the parent's
        window has moved on): the child is then admitted like any other request."""
        raise NotImplementedError(f"{type(self).__name__} cannot fork (can_fork is False)")

    @abstractmethod
    def tables(self, slot: int) -> list[Int32]:
        """Per KV group, the block ids of ``slot`` in token order."""

    @abstractmethod
    def retire(self, slot: int) -> int:
        """Take the slot's table away but keep its blocks untouched; returns a lease id for :meth:`settle`."""

    @abstractmethod
    def lease(self, blocks: Sequence[Int32]) -> int:
        """Keep ``blocks[g]`` of every group from reuse (a transfer reads or writes them); returns a lease id."""

    @abstractmethod
    def settle(self, lease: int) -> None:
        """End a lease; blocks nobody else needs become free, the tail of a table first."""

    def invalidate(self, blocks: Sequence[Int32]) -> list[tuple[int, int]]:
        """A load failed: forget the content of ``blocks[g]``; returns ``(slot, tokens still valid)`` for every table
        that holds one of them. Called before :meth:`transfer_ended`. The request whose load failed is rewound by the
        core; a cache that shares blocks must name the others, which are preempted: two requests must not both compute
        into one block."""
        return []

    def take_events(self) -> tuple[list[BlocksStored], list[BlocksEvicted]]:
        """What became findable, and what can no longer be found, since the last call: for ``trivet_blocks_stored`` and
        ``trivet_blocks_evicted``. Called after every commit when :attr:`has_events` is set."""
        return [], []

    def take_stores(self) -> list[Transfer]:
        """Stores to tiers that fell due since the last call; asked once per plan, at its end. ``transfer_id`` is set by
        the core; ``slot`` and ``epoch`` are -1 unless the blocks are of one request.

        A ``blocking`` store has read its blocks before the plan's step writes anything, so they may be evicted ones
        that belong to others already. Blocks of any other store the cache keeps from reuse until
        :meth:`transfer_ended`, since it knows of the store before the core does."""
        return []

    def transfer_ended(self, transfer: Transfer, *, ok: bool) -> None:
        """A load or store, also a connector's, ended on every worker; the core settles its own lease right after. Tells
        a cache when a tier, or a block, has the content."""

    def persist(self, limit: int) -> bool:
        """The engine shuts down in order and nothing runs any more: queue stores (:meth:`take_stores`) of up to
        ``limit`` further blocks whose content should outlive the process. Returns whether there were any; asked again
        once these stores were carried out."""
        return False

    @abstractmethod
    def reset(self) -> bool:
        """Forget all cached content; False (and no change) while blocks are in use."""

    @abstractmethod
    def stats(self) -> CacheStats:
        """Counts by block state; ``free + used + retired + leased == total`` always."""
