"""A plan's rows as flat arrays: what a forward pass and a sampler read, computed for the whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trivet.plan import Bool, Int32, Int64, LogitsRows, Ragged, StepPlan
from trivet.roles.sampler import SampleRows
from trivet.rows import spans
from trivet.worker.batch import PersistentBatch

_PROMPT = int(LogitsRows.PROMPT)


@dataclass(slots=True)
class DraftTree:
    """Drafts with branches, for all rows of a step. ``D`` is the largest number of drafts of a row."""

    lengths: Int32  #: [R] drafts of each row
    mask: Bool  #: [R, D, D]: draft ``j`` sees draft ``k``: itself and its ancestors
    parents: Int64  #: [T] flat index of a draft's parent, -1 for tokens that are no drafts


@dataclass(slots=True)
class StepInputs:
    """``R`` rows, ``T`` tokens flattened row after row, ``L`` logits rows: the sampling rows' first, then prompt
    logprobs'."""

    slots: Int32  #: [R]
    query_start: Int32  #: [R + 1]
    query_lens: Int32  #: [R]
    seq_lens: Int32  #: [R] context length after this step, drafts included
    known: Int32  #: [R] position where the drafts begin: the known tokens that precede them
    token_slots: Int32  #: [T] slot of each token
    places: Int64  #: [T] position of each token's keys and values in its table
    input_ids: Int64  #: [T]
    positions: Int64  #: [T] as ``places``, but drafts of one depth in a tree share a position
    drafts: Ragged  #: [R]
    draft_parents: Ragged | None
    tree: DraftTree | None
    logits_indices: Int64  #: [L] flat token index
    sample_rows: Int32  #: [S] plan rows that sample
    sample_starts: Int32  #: [S + 1] first logits row of each
    #: (slot, epoch, first prompt position predicted, first logits row, rows)
    prompt_rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def sampling(self, batch: PersistentBatch, bitmask: Any = None) -> SampleRows:
        """What the sampler is told about the logits rows."""
        rows = self.sample_rows
        slots, row_slots, positions = self.slots, self.token_slots, self.positions
        if len(rows) < len(slots):
            slots = slots[rows]
        if not len(rows) == len(self.logits_indices) == len(positions):  # else every token is a row that samples
            row_slots, positions = row_slots[self.logits_indices], positions[self.logits_indices]
        drafts, parents = self.drafts, self.draft_parents
        return SampleRows(
            plan_rows=rows,
            slots=slots,
            starts=self.sample_starts,
            positions=(positions + 1 - batch.num_prompt[row_slots]).astype(np.int32),
            row_slots=row_slots,
            drafts=_select(drafts, rows),
            draft_parents=None if parents is None else _select(parents, rows),
            prompt_rows=self.prompt_rows,
            bitmask=bitmask,
            tokens=batch.tokens,
            lengths=batch.lengths,
        )


def prepare_inputs(batch: PersistentBatch, plan: StepPlan, void: Bool) -> StepInputs:
    """Flatten the plan's rows; drafts are put behind the known tokens in ``batch.tokens``.

    Args:
        batch: With the plan's deltas applied.
        plan: With at least one row.
        void: ``[R]`` rows whose input is not what the plan assumed: they are computed, but get no logits.

    Raises:
        ValueError: If the plan has drafts without their ids, or parents that come after their children.
    """
    slots, query_lens, num_drafts = plan.slots, plan.num_scheduled, plan.num_drafts
    seq_lens = plan.num_computed + query_lens
    known = seq_lens - num_drafts
    query_start, places = spans(plan.num_computed, query_lens)
    token_slots = slots if places is plan.num_computed else np.repeat(slots, query_lens)  # one token each
    drafts, parents = _write_drafts(batch, plan, known)
    positions = wide = places.astype(np.int64)
    tree = None
    if parents is not None:
        positions = wide.copy()
        tree, depths = _tree(parents, query_start)
        _, flat = spans(query_start[1:] - num_drafts, num_drafts)
        positions[flat] = np.repeat(known, num_drafts) - 1 + depths
    inputs = StepInputs(
        slots=slots,
        query_start=query_start,
        query_lens=query_lens,
        seq_lens=seq_lens,
        known=known,
        token_slots=token_slots,
        places=wide,
        input_ids=batch.tokens[token_slots, places].astype(np.int64),
        positions=positions,
        drafts=drafts,
        draft_parents=parents,
        tree=tree,
        logits_indices=np.empty(0, np.int64),
        sample_rows=np.flatnonzero(plan.samples & ~void).astype(np.int32),
        sample_starts=np.zeros(1, np.int32),
    )
    _choose_logits(inputs, plan, batch, void)
    return inputs


def _select(ragged: Ragged, rows: Int32) -> Ragged:
    if len(rows) == len(ragged) or not len(ragged.values):
        return ragged if len(rows) == len(ragged) else Ragged.empty(len(rows))
    lengths = ragged.lengths[rows]
    offsets, flat = spans(ragged.offsets[rows], lengths)
    return Ragged(offsets, ragged.values[flat])


def _write_drafts(batch: PersistentBatch, plan: StepPlan, known: Int32) -> tuple[Ragged, Ragged | None]:
    counts = plan.num_drafts
    if not counts.any():
        return Ragged.empty(plan.num_rows), None
    drafts = plan.draft_ids
    if drafts is None or not np.array_equal(drafts.lengths, counts):
        raise ValueError(f"plan {plan.step_id} verifies {counts.tolist()} drafts per row without as many ids")
    _, columns = spans(known, counts)
    batch.tokens[np.repeat(plan.slots, counts), columns] = drafts.values
    parents = plan.draft_parents
    if parents is not None:
        within = np.arange(len(parents.values), dtype=np.int32) - np.repeat(parents.offsets[:-1], counts)
        if ((parents.values < -1) | (parents.values >= within)).any():
            raise ValueError(f"plan {plan.step_id}: a draft's parent must come before it in its row")
        if np.array_equal(parents.values, within - 1):
            parents = None  # all chains after all
    return drafts, parents


def _tree(parents: Ragged, query_start: Int32) -> tuple[DraftTree, Int32]:
    """The tree, and the depth of every draft (1: follows the last known token)."""
    lengths, rows = parents.lengths, len(parents)
    widest = int(lengths.max())
    filled = np.arange(widest) < lengths[:, None]
    padded = np.full((rows, widest), -1, np.int32)
    padded[filled] = parents.values
    every = np.arange(rows)
    depths = np.ones((rows, widest), np.int32)
    mask = np.zeros((rows, widest, widest), np.bool_)
    for node in range(widest):
        parent = padded[:, node]
        inner = (parent >= 0) & filled[:, node]
        depths[inner, node] = depths[every[inner], parent[inner]] + 1
        mask[inner, node] = mask[every[inner], parent[inner]]
        mask[filled[:, node], node, node] = True
    flat_parents = np.full(int(query_start[-1]), -1, np.int64)
    first = query_start[1:] - lengths
    _, flat = spans(first, lengths)
    # A parent of -1 is the token before the row's first draft.
    flat_parents[flat] = np.repeat(first, lengths) + parents.values
    return DraftTree(lengths.astype(np.int32), mask, flat_parents), depths[filled]


def _choose_logits(inputs: StepInputs, plan: StepPlan, batch: PersistentBatch, void: Bool) -> None:
    rows = inputs.sample_rows
    wanted = inputs.drafts.lengths[rows] + 1
    inputs.sample_starts, chosen = spans(inputs.query_start[1:][rows] - wanted, wanted)
    pieces = [chosen.astype(np.int64)]
    count = len(chosen)
    prompts = plan.logits_rows == _PROMPT
    for row in np.flatnonzero(prompts & ~void).tolist() if prompts.any() else ():
        slot, start = int(plan.slots[row]), int(plan.num_computed[row])
        # The logits at position p are about token p + 1; those of the last prompt token are the output's.
        number = min(int(plan.num_scheduled[row]), int(batch.num_prompt[slot]) - 1 - start)
        if number > 0:
            first = int(inputs.query_start[row])
            inputs.prompt_rows.append((slot, int(plan.epochs[row]), start + 1, count, number))
            pieces.append(np.arange(first, first + number, dtype=np.int64))
            count += number
    inputs.logits_indices = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
