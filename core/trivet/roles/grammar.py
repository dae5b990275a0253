"""Role ``grammar``: structured output. The engine validates, the sampling worker compiles and owns the matchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from trivet.plan import Int32
from trivet.roles.base import Role


class Matcher(ABC):
    """State of one request's grammar; can be rebuilt from (constraint, output ids)."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a token; False (and no change) when the grammar forbids it."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""

    @abstractmethod
    def fill_bitmask(self, out: Int32) -> None:
        """Set the bits of the tokens allowed next in ``out`` ``[ceil(vocab / 32)]`` int32 (bit ``t % 32`` of word
        ``t // 32``)."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the output is complete and nothing may follow."""

    def forced(self) -> Sequence[int]:
        """Tokens that must follow, without sampling."""
        return ()


class Grammar(Role):
    """Compiles constraints. :meth:`validate` runs in the engine's process, :meth:`compile` in a pool of the
    worker's."""

    role: ClassVar[str] = "grammar"

    @abstractmethod
    def validate(self, params: Any) -> bool:
        """Whether this provider serves the request's ``structured_outputs``; raises
        :class:`trivet.errors.RequestError` naming the keyword for a constraint that is invalid or not supported."""

    @abstractmethod
    def compile(self, params: Any, output_ids: Sequence[int]) -> Matcher:
        """A matcher that has accepted ``output_ids``. Runs off the loop, bounded in time and memory; raises with
        the reason."""

    def cancel(self, params: Any) -> None:
        """Nobody waits any longer for the :meth:`compile` under way that got this very ``params`` object: stop it if
        that is possible. Called on the worker's step thread; what the compilation returns or raises is dropped."""
