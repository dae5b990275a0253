"""Role ``cache_tier``: where evicted blocks go and come back from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from trivet.roles.base import Role


class CacheTier(Role):
    """The engine half, asked by the cache provider; block contents move through its ``worker_factory``
    (:class:`trivet.roles.TransferWorker`) as loads and stores of the plan."""

    role: ClassVar[str] = "cache_tier"
    #: the ``Transfer.endpoint`` that its worker half answers to
    endpoint: str = ""

    @abstractmethod
    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of ``keys`` (chained block hashes) this tier holds."""

    @abstractmethod
    def admit(self, keys: Sequence[bytes]) -> list[bool]:
        """Which evicted blocks to take; the cache then stores exactly those."""

    @abstractmethod
    def settled(self, keys: Sequence[bytes], *, ok: bool) -> None:
        """A store or load of ``keys`` ended."""
