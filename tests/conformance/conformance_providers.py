"""Small providers for roles and promises of which no bundled plugin has one."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from trivet.errors import RequestError
from trivet.hookspecs import hookimpl
from trivet.plan import NewRequest
from trivet.provider import Provider
from trivet.roles import LogitsProcessor, SampleRows
from trivet_schemas.options import Options


def tokens_before(rows: SampleRows, row: int) -> list[int]:
    """The known tokens of a logits row's request and the drafts that lead to the row."""
    slot = int(rows.row_slots[row])
    sampling = int(np.searchsorted(rows.starts, row, side="right")) - 1
    drafts = rows.drafts.row(sampling).tolist()
    node = row - int(rows.starts[sampling]) - 1
    parents = rows.draft_parents.row(sampling).tolist() if rows.draft_parents else list(range(-1, len(drafts) - 1))
    path: list[int] = []
    while node >= 0:
        path.insert(0, drafts[node])
        node = parents[node]
    return [*rows.tokens[slot, : rows.lengths[slot]].tolist(), *path]


class NoRepeat(LogitsProcessor):
    """Forbids the last ``no_repeat`` tokens."""

    def __init__(self, context: Any, options: Any) -> None:
        self._window: dict[int, int] = {}

    def validate(self, params: Any) -> None:
        window = (params.extra_args or {}).get("no_repeat", 1)
        if type(window) is not int or window < 1:
            raise RequestError(f"extra_args.no_repeat: must be a positive integer, got {window!r}", param="extra_args")

    def add(self, request: NewRequest) -> bool:
        window = (request.params.extra_args or {}).get("no_repeat")
        if window is not None:
            self._window[request.slot] = window
        return window is not None

    def remove(self, slot: int) -> None:
        del self._window[slot]

    def apply(self, logits: Any, rows: SampleRows, selected: Any) -> Any:
        for row in np.asarray(selected).tolist():
            window = self._window[int(rows.row_slots[row])]
            logits[row, tokens_before(rows, row)[-window:]] = -np.inf
        return logits


class FlattenOptions(Options):
    factor: float = Field(2.0, gt=0)


class Flatten(LogitsProcessor):
    """Divides the logits of every request."""

    keeps_argmax = True

    def __init__(self, context: Any, options: FlattenOptions) -> None:
        self._factor = options.factor

    def add(self, request: NewRequest) -> bool:
        return True

    def remove(self, slot: int) -> None:
        pass

    def apply(self, logits: Any, rows: SampleRows, selected: Any) -> Any:
        logits[selected] /= self._factor
        return logits


@hookimpl
def trivet_providers() -> list[Provider]:
    here = "conformance_providers"
    return [
        Provider("logits_processor", "no_repeat", f"{here}:NoRepeat"),
        Provider("logits_processor", "flatten", f"{here}:Flatten", options=FlattenOptions),
    ]
