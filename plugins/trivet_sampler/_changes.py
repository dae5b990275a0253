"""What requests do to their logits before a token is drawn: masks, biases, penalties, processors. Only rows whose
requests ask for it are copied to float32 and changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trivet.plan import Bool, Int32, Int64, Ragged
from trivet.rows import spans
from trivet_kernels.reference.logits import SparseTokens
from trivet_kernels.sampling import add_bias, apply_penalties, float_rows
from trivet_kernels.transfer import to_device

if TYPE_CHECKING:
    from trivet.roles import LogitsProcessor, SampleRows
    from trivet_sampler._state import SlotState


@dataclass(slots=True)
class Changed:
    """Float32 copies of some logits rows, changed."""

    rows: Int64  #: [m] logits rows, ascending
    logits: Tensor  #: [m, vocab_size]
    scaled: Bool  #: [m] rows that have been divided by their temperature


class Changer:
    """Carries out a batch's changes, in the order of the parameters.

    Args:
        state: What the slots want.
        processors: The logits processors, in their order.
    """

    def __init__(self, state: SlotState, processors: Sequence[LogitsProcessor]) -> None:
        self._state, self._processors = state, processors
        self._memory: Tensor | None = None

    def change(self, logits: Tensor, rows: SampleRows) -> Changed | None:
        """Changed copies of the rows that a request changes; None if there are none."""
        state = self._state
        first, last = int(rows.starts[0]), int(rows.starts[-1])
        slots = rows.row_slots[first:last]
        constrained = constrained_rows(rows)[first:last]
        wanted = state.changes[slots] | constrained
        early = rows.positions[first:last] < state.min_tokens[slots]
        wanted |= early
        active = self._active(slots)
        for applies in active:
            wanted |= applies
        if not wanted.any():
            return None
        index = np.flatnonzero(wanted)
        slots, chosen = slots[index], index + first
        mask = self._mask(rows, chosen, slots, constrained[index], logits)
        self._memory = float_rows(logits, chosen, mask, self._memory)
        work = self._memory[: len(chosen)]
        self._sparse(work, rows, chosen, slots, early[index])
        changed = Changed(chosen, work, np.zeros(len(chosen), np.bool_))
        if any(applies.any() for applies in active):
            self._process(changed, rows, [applies[index] for applies in active])
        return changed

    def _active(self, slots: Int32) -> list[Bool]:
        """Which logits rows each processor is for, ``[rows]``; greedy ones skip those that keep the likeliest token."""
        active = []
        for processor, wants in zip(self._processors, self._state.wants, strict=True):
            applies = wants[slots]
            active.append(applies & ~self._state.greedy[slots] if processor.keeps_argmax else applies)
        return active

    def _mask(self, rows: SampleRows, chosen: Int64, slots: Int32, constrained: Bool, logits: Tensor) -> Tensor | None:
        """The grammar's bits and those of the allowed ids, ``[m, words]``; None if neither is there."""
        listed = self._state.has_allowed[slots]
        if not listed.any() and not constrained.any():
            return None
        if not listed.any():
            return _at(rows.bitmask, chosen)
        # Slots without a list have no bits set, which costs no memory, and allow everything.
        bits = np.where(listed[:, None], self._state.allowed[slots], np.int32(-1))
        allowed = to_device(bits, logits.device)
        return allowed & _at(rows.bitmask, chosen) if constrained.any() else allowed

    def _sparse(self, work: Tensor, rows: SampleRows, chosen: Int64, slots: Int32, early: Bool) -> None:
        """Changes of single tokens, in place."""
        state = self._state
        worded = np.flatnonzero(state.words.has[slots])
        if len(worded):
            row, ids = state.words.forbidden(rows, chosen[worded])
            _forbid(work, worded[row], ids)
        young = np.flatnonzero(early)
        if len(young):
            row, (ids,) = state.stops.gather(slots[young])
            _forbid(work, young[row], ids)
        biased = np.flatnonzero(state.bias.has[slots])
        if len(biased):
            row, (ids, bias) = state.bias.gather(slots[biased])
            counts = np.bincount(row, minlength=len(biased)).astype(np.int32)
            offsets, _ = spans(np.zeros(len(biased), np.int32), counts)
            add_bias(work, _sparse_tokens(biased, offsets, ids, work.device), to_device(bias, work.device))
        penalised = np.flatnonzero(state.history.has[slots])
        if len(penalised):
            offsets, ids, times = state.history.tokens(rows, chosen[penalised])
            own = slots[penalised]
            factors = (state.repetition[own], state.frequency[own], state.presence[own])
            apply_penalties(
                work,
                _sparse_tokens(penalised, offsets, ids, work.device),
                to_device(times, work.device),
                *(to_device(factor, work.device) for factor in factors),
            )

    def _process(self, changed: Changed, rows: SampleRows, active: list[Bool]) -> None:
        """Let the processors change their rows. They get the requests that one of them is for, and no others."""
        concerned = np.logical_or.reduce(active)
        part = narrowed(rows, np.isin(rows.slots, rows.row_slots[changed.rows[concerned]]))
        at = np.flatnonzero(concerned)
        work = changed.logits if len(at) == len(concerned) else changed.logits[to_device(at, changed.logits.device)]
        for processor, applies in zip(self._processors, active, strict=True):
            if applies.any() and not processor.keeps_argmax:
                work = _apply(processor, work, part, np.flatnonzero(applies[at]))
        keeping = [applies for p, applies in zip(self._processors, active, strict=True) if p.keeps_argmax]
        changed.scaled = np.logical_or.reduce([*keeping, np.zeros(len(concerned), np.bool_)])
        if changed.scaled.any():
            slots = part.row_slots
            temperature = np.where(changed.scaled[at], self._state.temperature[slots], np.float32(1))
            work /= to_device(temperature, work.device)[:, None]
        for processor, applies in zip(self._processors, active, strict=True):
            if applies.any() and processor.keeps_argmax:
                work = _apply(processor, work, part, np.flatnonzero(applies[at]))
        if work is not changed.logits:
            changed.logits[to_device(at, work.device)] = work


def constrained_rows(rows: SampleRows) -> Bool:
    """``[L]`` logits rows of which a grammar forbids some token, or may do so."""
    if rows.constrained is not None:
        return rows.constrained
    return np.full(len(rows.row_slots), rows.bitmask is not None, np.bool_)


def narrowed(rows: SampleRows, kept: Bool) -> SampleRows:
    """The batch with only the sampling rows ``kept`` ``[S]``, their logits rows one after the other from 0."""
    counts = np.diff(rows.starts)[kept]
    starts, at = spans(rows.starts[:-1][kept], counts)
    return replace(
        rows,
        plan_rows=rows.plan_rows[kept],
        slots=rows.slots[kept],
        starts=starts,
        positions=rows.positions[at],
        row_slots=rows.row_slots[at],
        drafts=_select(rows.drafts, kept),
        draft_parents=None if rows.draft_parents is None else _select(rows.draft_parents, kept),
        prompt_rows=[],
        bitmask=None if rows.bitmask is None else _at(rows.bitmask, at),
        constrained=None if rows.constrained is None else rows.constrained[at],
    )


def _select(ragged: Ragged, kept: Bool) -> Ragged:
    offsets, at = spans(ragged.offsets[:-1][kept], ragged.lengths[kept])
    return Ragged(offsets, ragged.values[at])


def _apply(processor: LogitsProcessor, logits: Tensor, rows: SampleRows, chosen: Int64) -> Tensor:
    changed = processor.apply(logits, rows, to_device(chosen, logits.device))
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        got = f"a tensor {list(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
        raise TypeError(
            f"logits processor {type(processor).__name__}: apply must return the logits {list(logits.shape)}, got {got}"
        )
    return changed


def _forbid(work: Tensor, rows: Int64, ids: Int32) -> None:
    # A number in place of a tensor would be copied to the device, and waited for.
    lowest = torch.full((), -torch.inf, device=work.device)
    work[to_device(rows, work.device), to_device(ids.astype(np.int64), work.device)] = lowest


def _sparse_tokens(rows: Int64, offsets: Int32, ids: Int32, device: torch.device) -> SparseTokens:
    most = int(np.diff(offsets).max())
    return SparseTokens(to_device(rows, device), to_device(offsets, device), to_device(ids, device), most)


def _at(bitmask: Tensor, rows: Any) -> Tensor:
    return bitmask[to_device(np.asarray(rows, np.int64), bitmask.device)]
