"""The logits processor ``acme_no_echo``: makes the token before less likely, for requests that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from trivet.errors import RequestError
from trivet.roles import LogitsProcessor
from trivet_schemas.options import Options

if TYPE_CHECKING:
    from trivet.context import Context
    from trivet.plan import NewRequest
    from trivet.roles import SampleRows

NAME = "acme_no_echo"


class NoEchoOptions(Options):
    """Options of ``acme_no_echo``."""

    strength: float = Field(3.0, gt=0)
    """What is subtracted for a request that asks with ``true``."""


class NoEcho(LogitsProcessor):
    """Requests ask with ``extra_args={"acme_no_echo": true}``, or with a strength of their own."""

    def __init__(self, context: Context, options: NoEchoOptions) -> None:
        self._default = options.strength
        self._strengths: dict[int, float] = {}

    def validate(self, params: Any) -> None:
        """Refuse what is neither true nor false nor a positive number."""
        value = (params.extra_args or {}).get(NAME)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not isinstance(value, bool) and not (number and value > 0):
            message = f"extra_args[{NAME!r}] must be true, false or a positive number, got {value!r}"
            raise RequestError(message, param="extra_args")

    def add(self, request: NewRequest) -> bool:
        """Whether the request asks for it."""
        value = (request.params.extra_args or {}).get(NAME)
        if value:
            self._strengths[request.slot] = self._default if value is True else float(value)
        return bool(value)

    def remove(self, slot: int) -> None:
        """Forget a strength."""
        del self._strengths[slot]

    def apply(self, logits: Any, rows: SampleRows, selected: Any) -> Any:
        """All selected rows at once; those of drafts follow the draft itself, in a chain and in a tree."""
        assert rows.lengths is not None
        before = np.empty(len(rows.row_slots), np.int64)
        first = np.zeros(len(before), np.bool_)
        first[rows.starts[:-1]] = True
        before[rows.starts[:-1]] = rows.tokens[rows.slots, rows.lengths[rows.slots] - 1]
        before[~first] = rows.drafts.values
        chosen = np.array(selected.tolist(), np.int64)
        strengths = np.array([self._strengths[slot] for slot in rows.row_slots[chosen].tolist()])
        for strength in np.unique(strengths).tolist():
            some = chosen[strengths == strength]
            logits[some, before[some]] -= strength
        return logits
