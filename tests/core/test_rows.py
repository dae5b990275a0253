"""Array helpers of the planner: rows of one token each and rows of several."""

from __future__ import annotations

import numpy as np
import pytest

from trivet.ledger import BlockLedger
from trivet.rows import block_delta, cells, gather_tokens, spans


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [([5, 0, 9], [1, 1, 1]), ([5, 0, 9], [2, 0, 3]), ([5, 0], [2, 0]), ([3], [0]), ([], []), ([4, 4, 4], [0, 2, 1])],
)
def test_spans_list_every_index_of_every_run(starts: list[int], lengths: list[int]) -> None:
    offsets, flat = spans(i32(*starts), i32(*lengths))
    assert flat.tolist() == [i for s, n in zip(starts, lengths, strict=True) for i in range(s, s + n)]
    assert offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    rows, columns = cells(np.arange(len(starts)) * 10, i32(*starts), i32(*lengths))
    assert columns.tolist() == flat.tolist()
    assert rows.tolist() == [10 * row for row, n in enumerate(lengths) for _ in range(n)]


@pytest.mark.parametrize("ends", [[1, 3, 5], [3, 2, 4], [0, 2, 4]])
def test_tokens_are_gathered_row_by_row(ends: list[int]) -> None:
    tokens = np.arange(60, dtype=np.int32).reshape(6, 10)
    slots, starts = [4, 0, 2], [0, 2, 4]
    found = gather_tokens(tokens, np.array(slots), i32(*starts), i32(*ends))
    for row, (slot, start, end) in enumerate(zip(slots, starts, ends, strict=True)):
        assert found.row(row).tolist() == tokens[slot, start:end].tolist()


@pytest.mark.parametrize("slots", [[], [3], [3, 1, 2], [3, 3, 1, 1, 1, 2], [1, 1, 3]])
def test_a_delta_has_a_row_per_slot(slots: list[int]) -> None:
    blocks = [10 * i for i in range(len(slots))]
    delta = block_delta(slots, blocks)
    found = [(s, b) for i, s in enumerate(delta.slots.tolist()) for b in delta.blocks.row(i).tolist()]
    assert found == list(zip(slots, blocks, strict=True))
    assert delta.slots.tolist() == list(dict.fromkeys(slots))


class TestLedger:
    def test_blocks_of_several_groups_are_appended_and_dropped_together(self) -> None:
        ledger = BlockLedger(20, 4, [5, 5])
        owners = ledger.append_rows(np.array([2, 0]), i32(2, 1), [7, 8, 9, 4, 5, 6], [0, 1])
        assert owners.tolist() == [2, 2, 0]
        assert [ledger.blocks(2, g).tolist() for g in (0, 1)] == [[7, 8], [4, 5]]
        assert [ledger.blocks(0, g).tolist() for g in (0, 1)] == [[9], [6]]
        assert ledger.drop(np.array([2, 0]), [0, 1], i32(0, 0), i32(2, 1)) == [7, 8, 9, 4, 5, 6]
        assert ledger.blocks(2).tolist() == [0, 0]
        ledger.check_integrity(range(1, 20))

    def test_a_block_that_two_tables_drop_at_once_is_given_back_once(self) -> None:
        ledger = BlockLedger(10, 3, 4)
        ledger.append_rows(np.array([0]), i32(2), [3, 4], [0])
        ledger.append(1, [3, 5])
        ledger.append(2, [4])
        assert ledger.drop(np.array([0, 1]), [0], i32(0, 0), i32(2, 2)) == [3, 5]
        ledger.check_integrity([block for block in range(1, 10) if block != 4])
