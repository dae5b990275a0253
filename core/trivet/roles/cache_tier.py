"""Role ``cache_tier``: where evicted blocks go and come back from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trivet.plan import Transfer
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.context import EngineContext
    from trivet.roles.kv import KVLayout


@dataclass(frozen=True, slots=True)
class TierStore:
    """Which of the offered blocks a tier takes, and what its worker half needs to know to store them."""

    taken: list[bool]
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class TierLoad:
    """How blocks come back: ``blocking`` loads are complete before the forward of their step, others hold the
    request."""

    blocking: bool
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of a tier since the start, in blocks unless they say otherwise."""

    name: str
    capacity: int = 0
    held: int = 0
    stored: int = 0
    loaded: int = 0
    dropped: int = 0  #: forgotten to make room, or because they were damaged or lost
    refused: int = 0  #: offered and not taken, for lack of room
    store_bytes: int = 0
    load_bytes: int = 0


class CacheTier(Role):
    """The engine half, asked by the cache provider; block contents move through its ``worker_factory``
    (:class:`trivet.roles.TransferWorker`) as loads and stores of the plan. All methods run on the engine's thread.

    A *key* names the content of one block in one KV group: equal keys mean equal content, also in another process.
    Bad luck of a tier (a full disk, a damaged file) is a miss and never an error."""

    role: ClassVar[str] = "cache_tier"
    #: the ``Transfer.endpoint`` that its worker half answers to
    endpoint: str = ""
    #: whether it keeps content beyond the process; the cache then offers it what the pool still has at the shutdown
    persists: bool = False

    def check(self, context: EngineContext, layout: KVLayout) -> None:
        """Raise :class:`trivet.errors.TrivetError` for options that cannot work with this layout, naming them. Called
        before the workers allocate anything, and by ``trivet config check``; allocates and writes nothing itself."""

    def bind(self, context: EngineContext) -> None:
        """Called once, before the cache's own ``bind``; the workers have allocated their storage by then, and
        ``context.layout`` and ``context.info`` say what a block is and where it lies."""

    @abstractmethod
    def holds(self, key: bytes) -> bool:
        """Whether the content can be loaded, by a plan that is sent from now on."""

    @abstractmethod
    def store(self, keys: Sequence[bytes]) -> TierStore:
        """Blocks are being evicted: which of them to take. Those taken travel in one blocking store of the next plan,
        and count as held from now on."""

    @abstractmethod
    def load(self, keys: Sequence[bytes]) -> TierLoad:
        """Keys that it holds will be loaded by the next plan; they stay until :meth:`settled`."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Content that it holds was used, or evicted, elsewhere: no need to store it again."""

    @abstractmethod
    def settled(self, transfer: Transfer, *, store: bool, ok: bool) -> None:
        """A store or load ended on every worker. Null blocks have empty keys."""

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """The content is damaged, or must not be used any more; unknown keys have no effect."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything; no transfer is under way."""

    def stats(self) -> TierStats:
        """Figures for metrics."""
        return TierStats(self.endpoint)
