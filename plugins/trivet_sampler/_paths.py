"""Which drafts precede a logits row: a chain's, or those on the way from a tree's root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from trivet.plan import Int32, Int64

if TYPE_CHECKING:
    from trivet.roles import SampleRows


def ancestors(rows: SampleRows, chosen: Int64) -> Iterator[tuple[Int64, Int32]]:
    """Goes from logits rows towards the known tokens, one draft at a time for all of them.

    Args:
        rows: The batch.
        chosen: ``[m]`` logits rows.

    Yields:
        ``[a]`` indices into ``chosen`` of the rows that go on, and ``[a]`` the draft that comes next on their way;
        first the last of the tokens before a row.
    """
    owner = np.searchsorted(rows.starts, chosen, side="right") - 1
    node = chosen - rows.starts[owner] - 1
    first = rows.drafts.offsets[owner]
    active = np.flatnonzero(node >= 0)
    while len(active):
        at = first[active] + node[active]
        yield active, rows.drafts.values[at]
        node[active] = node[active] - 1 if rows.draft_parents is None else rows.draft_parents.values[at]
        active = active[node[active] >= 0]


def before(rows: SampleRows, chosen: Int64, count: int, num_prompt: Int32, missing: int) -> Int32:
    """The last ``count`` output tokens before each of the logits rows ``chosen`` ``[m]``, drafts included.

    Args:
        rows: The batch.
        chosen: ``[m]`` logits rows.
        count: Tokens wanted.
        num_prompt: ``[m]`` prompt tokens of each row's request.
        missing: Stands where the output has fewer.

    Returns:
        ``[m, count]``, the last token first.
    """
    found = np.full((len(chosen), count), missing, np.int32)
    drafts = np.zeros(len(chosen), np.int64)
    for depth, (active, ids) in enumerate(ancestors(rows, chosen)):
        drafts[active] += 1
        if depth < count:
            found[active, depth] = ids
    slots = rows.row_slots[chosen]
    assert rows.lengths is not None
    place = rows.lengths[slots][:, None] - 1 - (np.arange(count) - drafts[:, None])
    known = (np.arange(count) >= drafts[:, None]) & (place >= num_prompt[:, None])
    row, column = known.nonzero()
    found[row, column] = rows.tokens[slots[row], place[row, column]]
    return found
