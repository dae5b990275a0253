"""Role ``logits_processor``: changes to the logits of the whole batch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.plan import NewRequest
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.sampler import SampleRows


class LogitsProcessor(Role):
    """Sees every sampling row of a step at once that it is for, draft rows included. A sampler may leave out the rows
    of requests that no processor is for.

    State is kept by slot; a request keeps its slot while it runs, so rows are added and removed but never move.
    """

    role: ClassVar[str] = "logits_processor"
    #: True promises that the most likely token stays the same: greedy rows then skip this processor
    keeps_argmax: ClassVar[bool] = False

    def validate(self, params: Any) -> None:
        """Check a request's ``extra_args`` at admission, in the engine's process; raise
        :class:`trivet.errors.RequestError` to refuse it. Must not depend on worker state."""

    @abstractmethod
    def add(self, request: NewRequest) -> bool:
        """A request enters its slot; returns whether this processor applies to it at all."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """The request in ``slot`` left; only called if :meth:`add` returned True."""

    @abstractmethod
    def apply(self, logits: Any, rows: SampleRows, selected: Any) -> Any:
        """Return the changed logits ``[L, vocab_size]`` float32 (in place or new); only rows in ``selected``
        ``[n]`` int64 (the logits rows of requests that want this processor) may change. Tokens before draft row
        ``j`` are the request's known tokens followed by the row's first ``j`` drafts."""
