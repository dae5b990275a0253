"""The persistent batch: tokens and block tables of running requests, kept by slot and changed by a plan's deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trivet.plan import Int32, Int64, NewRequest, Ragged, StepPlan
from trivet.rows import spans

#: positions beyond the context length for which there is room: drafts and the tokens that follow them
MARGIN = 256


@dataclass(slots=True)
class BatchChanges:
    """What a plan's deltas did to the slots; plugins that keep state by slot are told, removals first."""

    removed: list[NewRequest] = field(default_factory=list)
    added: list[NewRequest] = field(default_factory=list)


class PersistentBatch:
    """Columns and matrices by slot. Steady decoding touches them with whole-array operations only.

    ``tokens[slot, :lengths[slot]]`` are the known tokens of a slot: those the engine sent and those the worker drew
    itself and the engine may not have seen yet. ``tables[g][slot, :table_lengths[g][slot]]`` are its blocks in KV
    group ``g``. Rows of ``tokens`` end ``MARGIN`` positions beyond the context length, so that drafts fit behind
    the last token."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int]) -> None:
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.block_sizes = tuple(block_sizes)
        width = max_model_len + MARGIN
        # Untouched pages of a zeroed matrix cost no memory.
        self.tokens: Int32 = np.zeros((max_num_seqs, width), np.int32)
        self.lengths: Int32 = np.zeros(max_num_seqs, np.int32)
        #: tokens that came from the engine; the next ones it sends follow these
        self.num_sent: Int32 = np.zeros(max_num_seqs, np.int32)
        self.num_prompt: Int32 = np.zeros(max_num_seqs, np.int32)
        self.epochs: Int64 = np.full(max_num_seqs, -1, np.int64)
        self.requests: list[NewRequest | None] = [None] * max_num_seqs
        self.tables: list[Int32] = [np.zeros((max_num_seqs, -(-width // size)), np.int32) for size in block_sizes]
        self.table_lengths: list[Int32] = [np.zeros(max_num_seqs, np.int32) for _ in block_sizes]

    def apply(self, plan: StepPlan) -> BatchChanges:
        """Carry out a plan's deltas of requests, blocks and tokens.

        Raises:
            ValueError: If the plan contradicts the batch: an unknown slot or epoch, or tokens or blocks beyond the
        limits."""
        changes = BatchChanges()
        for slots, epochs in ((plan.preempted, plan.preempted_epochs), (plan.finished, plan.finished_epochs)):
            for slot, epoch in zip(slots.tolist(), epochs.tolist(), strict=True):
                if self.epochs[slot] == epoch:
                    changes.removed.append(self._remove(slot))
        for request in plan.new:
            if self.requests[request.slot] is not None:
                changes.removed.append(self._remove(request.slot))
            self._add(request)
            changes.added.append(request)
        for group, delta in enumerate(plan.new_blocks):
            self._append_blocks(group, delta.slots, delta.blocks)
        if plan.num_rows:
            stale = self.epochs[plan.slots] != plan.epochs
            if stale.any():
                row = int(stale.argmax())
                slot, epoch = int(plan.slots[row]), int(plan.epochs[row])
                raise ValueError(
                    f"plan {plan.step_id} names slot {slot} with epoch {epoch}, here it is {self.epochs[slot]}"
                )
            self._append_sent(plan)
        return changes

    def set_known(self, slots: Int32, starts: Int32, tokens: Ragged) -> None:
        """Row ``i`` of ``tokens`` becomes known from position ``starts[i]`` of ``slots[i]`` on, and its last tokens."""
        lengths = tokens.lengths
        _, columns = spans(starts, lengths)
        self.tokens[slots if columns is starts else np.repeat(slots, lengths), columns] = tokens.values
        self.lengths[slots] = starts + lengths

    def locations(self, group: int, slots: Int32, positions: Int64) -> Int64:
        """``[n]`` flat places ``block * block_size + offset`` of single positions of slots, in the storage of a KV
        group."""
        size = self.block_sizes[group]
        blocks, offsets = np.divmod(positions, size)
        places: Int64 = self.tables[group][slots, blocks].astype(np.int64) * size + offsets
        return places

    def check_integrity(self) -> None:
        """Raise AssertionError when columns and requests contradict each other."""
        for slot, request in enumerate(self.requests):
            if request is None:
                assert self.epochs[slot] == -1, f"slot {slot} is empty but has epoch {self.epochs[slot]}"
                continue
            assert request.slot == slot, f"{request.request_id} is in slot {slot}, not {request.slot}"
            assert request.epoch == self.epochs[slot], f"{request.request_id} has another epoch than its slot"
            assert 0 < self.num_prompt[slot] <= self.num_sent[slot] <= self.lengths[slot], request.request_id

    def _add(self, request: NewRequest) -> None:
        slot, count = request.slot, len(request.token_ids)
        if count > self.tokens.shape[1]:
            raise ValueError(f"request {request.request_id} has {count} tokens, the context holds {self.max_model_len}")
        self.tokens[slot, :count] = request.token_ids
        self.lengths[slot] = self.num_sent[slot] = count
        self.num_prompt[slot] = request.num_prompt
        self.epochs[slot] = request.epoch
        self.requests[slot] = request
        for group, blocks in enumerate(request.blocks):
            self.tables[group][slot, : len(blocks)] = blocks
            self.table_lengths[group][slot] = len(blocks)

    def _remove(self, slot: int) -> NewRequest:
        request = self.requests[slot]
        assert request is not None
        self.requests[slot] = None
        self.epochs[slot] = -1
        self.lengths[slot] = 0
        for lengths in self.table_lengths:
            lengths[slot] = 0
        return request

    def _append_blocks(self, group: int, slots: Int32, blocks: Ragged) -> None:
        if not len(slots):
            return
        table, lengths = self.tables[group], self.table_lengths[group]
        if len(np.unique(slots)) < len(slots):
            # A slot in several rows: each row continues where the one before it ended.
            for row, slot in enumerate(slots.tolist()):
                added = blocks.row(row)
                table[slot, lengths[slot] : lengths[slot] + len(added)] = added
                lengths[slot] += len(added)
            return
        added_lengths = blocks.lengths
        _, columns = spans(lengths[slots], added_lengths)
        table[np.repeat(slots, added_lengths), columns] = blocks.values
        lengths[slots] += added_lengths

    def _append_sent(self, plan: StepPlan) -> None:
        if not len(plan.tokens.values):
            return
        counts, starts = plan.tokens.lengths, self.num_sent[plan.slots]
        _, columns = spans(starts, counts)
        self.tokens[np.repeat(plan.slots, counts), columns] = plan.tokens.values
        self.num_sent[plan.slots] = starts + counts
        self.lengths[plan.slots] = np.maximum(self.lengths[plan.slots], starts + counts)
