"""Role ``connector``: KV blocks from and to other instances; and the worker half that tiers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from trivet.plan import Int32, Transfer
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.attention import Attention
    from trivet.state import Request


@dataclass(slots=True)
class ExternalHit:
    """Tokens ``[start, start + num_tokens)`` can be loaded. ``blocking``: within the step; otherwise the request is
    held."""

    num_tokens: int
    keys: list[bytes] = field(default_factory=list)
    blocking: bool = False
    payload: bytes = b""


class Connector(Role):
    """The engine half. Its worker half is the provider's ``worker_factory``, a :class:`TransferWorker`."""

    role: ClassVar[str] = "connector"
    #: the ``Transfer.endpoint`` that its worker half answers to
    endpoint: str = ""

    @abstractmethod
    def match(self, request: Request, start: int) -> ExternalHit | None:
        """What can be loaded of the request's known tokens from position ``start`` on; called once per admission."""

    @abstractmethod
    def finished(self, request: Request, tables: list[Int32]) -> ExternalHit | None:
        """A request is done; return what to store of it before its blocks are freed, or None."""


@dataclass(slots=True)
class TransferReport:
    """What ended since the last poll."""

    finished: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    #: per KV group, block ids whose content must not be used
    invalid_blocks: list[list[int]] = field(default_factory=list)


class TransferWorker(ABC):
    """The worker half of a connector or cache tier. Called on the worker's step thread; the work itself may run
    elsewhere."""

    #: the ``Transfer.endpoint`` that it answers to, as its engine half names it
    endpoint: str = ""
    #: whether :meth:`layer_written` is called (costs a call per layer and step)
    wants_layers: ClassVar[bool] = False

    @abstractmethod
    def bind(self, attention: Attention | None) -> None:
        """Called once, with the storage that transfers read and write. Which layers a KV group has, and its block size,
        say ``context.layout.groups``; ``attention.kv(layer)`` is that layer's storage."""

    @abstractmethod
    def submit(self, transfer: Transfer, *, store: bool) -> None:
        """Start a transfer; a ``blocking`` one must be complete (or have failed) at the next :meth:`poll`. With several
        ranks it must end alike on all of them, since they go on to compute the same rows. Block 0 stands for blocks
        that left a window: there is nothing to move."""

    def layer_written(self, layer: int) -> None:
        """The step's keys and values of a layer are in the storage (on an accelerator: enqueued on the current stream),
        so a store of blocks that this very step writes can send them while later layers are computed. Called on the
        worker's step thread after each attention call, if :attr:`wants_layers` is set and the model runs eagerly: a
        captured graph makes no calls."""

    @abstractmethod
    def poll(self) -> TransferReport:
        """What has ended; called once per step before its forward, and once after."""

    def shutdown(self) -> None:
        """Stop; unfinished transfers need not be reported."""
