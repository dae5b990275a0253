"""A plugin that breaks steps on purpose. A module, so that workers in other processes can load it too."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.errors import RequestError, RequestFault
from trivet.hookspecs import hookimpl
from trivet.plan import NewRequest
from trivet.provider import Provider
from trivet.roles import LogitsProcessor, SampleRows

if TYPE_CHECKING:
    from trivet.roles import ForwardBatch, ForwardOutput

#: a batch in which this token is computed raises
POISON = 63
#: a request whose ``extra_args`` have this key is ended by a RequestFault after as many output tokens
FAULT = "fault_after"


@hookimpl(wrapper=True)
def trivet_forward(batch: ForwardBatch) -> Generator[None, ForwardOutput, ForwardOutput]:
    """Raise for a poisoned batch."""
    if (np.asarray(batch.input_ids) == POISON).any():
        raise RuntimeError("the batch is poisoned")
    return (yield)


class FaultyProcessor(LogitsProcessor):
    """Ends single requests with a :class:`trivet.errors.RequestFault`."""

    def __init__(self, context: Any, options: Any) -> None:
        self._after: dict[int, tuple[str, int]] = {}

    def validate(self, params: Any) -> None:
        """The number must be one."""
        after = (params.extra_args or {}).get(FAULT, 0)
        if not isinstance(after, int):
            raise RequestError(f"extra_args.{FAULT}: must be an integer, got {after!r}", param="extra_args")

    def add(self, request: NewRequest) -> bool:
        """Whether the request is to end."""
        after = (getattr(request.params, "extra_args", None) or {}).get(FAULT)
        if after is not None:
            self._after[request.slot] = request.request_id, after
        return after is not None

    def remove(self, slot: int) -> None:
        """Forget the slot."""
        del self._after[slot]

    def apply(self, logits: Any, rows: SampleRows, selected: Any) -> Any:
        """Raise for those whose time has come."""
        due = {}
        for row in np.asarray(selected).tolist():
            request_id, after = self._after[int(rows.row_slots[row])]
            if rows.positions[row] >= after:
                due[request_id] = f"it was to end after {after} tokens"
        if due:
            raise RequestFault(due)
        return logits


@hookimpl
def trivet_providers() -> list[Provider]:
    """The processor's descriptor."""
    return [Provider("logits_processor", "faulty", f"{__name__}:FaultyProcessor")]
