"""The sampler: one pass over the logits of all rows, whatever their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from trivet.plan import Bool, Float32, Int32, Int64, NewRequest, Ragged, Task
from trivet.result import PromptLogprobs, RequestFailure, RowLogprobs
from trivet.roles import Sampled, Sampler
from trivet_kernels.reference import sampling as kernels
from trivet_kernels.sampling import apply_bitmask, argmax, fused
from trivet_sampler._logprobs import Wanted, logprobs
from trivet_sampler._state import NO_LOGPROBS, SlotState
from trivet_sampler._verify import follow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trivet.context import WorkerContext
    from trivet.roles import LogitsProcessor, SampleRows

#: rows that are drawn from at once; float32 copies of their logits are held meanwhile
_BLOCK = 64


class TorchSampler(Sampler):
    """Draws with PyTorch operations, by Gumbel-max with noise that is a function of seed, output position and token id.

    The order on each row: raw logprobs, float32, grammar, min_tokens, processors that change the argmax, temperature,
    processors that keep it, min_p, top_k, top_p, draw. Greedy rows take the likeliest token, the lowest id of equals.
    """

    fields: ClassVar[frozenset[str]] = frozenset(
        {"temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "logprobs", "prompt_logprobs"}
    )

    def __init__(self, context: WorkerContext | None = None, options: None = None) -> None:
        self._processors: list[LogitsProcessor] = []
        self._state = SlotState(0, 0)
        self._size = 0

    def bind(
        self, vocab_size: int, tokenizer_size: int, max_num_seqs: int, processors: Sequence[LogitsProcessor]
    ) -> None:
        self._size = min(vocab_size, tokenizer_size)
        self._processors = list(processors)
        self._state = SlotState(max_num_seqs, len(self._processors))

    def add(self, request: NewRequest) -> None:
        if self._state.epoch[request.slot] >= 0:
            self.remove(request.slot)
        self._state.add(request)
        if request.task == Task.GENERATE:
            for number, processor in enumerate(self._processors):
                self._state.wants[number, request.slot] = processor.add(request)

    def remove(self, slot: int) -> None:
        wanted = np.flatnonzero(self._state.wants[:, slot]).tolist()
        self._state.clear(slot)
        for number in wanted:
            self._processors[number].remove(slot)

    def sample(self, logits: Tensor, rows: SampleRows) -> Sampled:
        errors: dict[int, RequestFailure] = {}
        prompt_logprobs = self._prompt_logprobs(logits, rows, errors)
        if not len(rows.slots):
            return Sampled(Ragged.empty(), [], prompt_logprobs, list(errors.values()))
        starts, first = rows.starts - rows.starts[0], int(rows.starts[0])
        drawn, highest = self._draw(*self._change(logits, rows), rows)
        taken, paths = _verify(drawn, starts, rows)
        lost = np.logical_or.reduceat(taken & ~np.isfinite(highest), starts[:-1])
        for row in np.flatnonzero(lost).tolist():
            slot, part = int(rows.slots[row]), slice(starts[row], starts[row + 1])
            at = int(np.flatnonzero(taken[part] & ~np.isfinite(highest[part]))[0] + starts[row])
            errors.setdefault(slot, self._failure(slot, self._complaint(float(highest[at]), first + at, rows)))
        failed = np.isin(rows.slots, list(errors))
        taken &= ~np.repeat(failed, np.diff(starts))
        offsets = np.zeros(len(starts), np.int32)
        np.cumsum(np.add.reduceat(taken, starts[:-1], dtype=np.int32), out=offsets[1:])
        result = Sampled(Ragged(offsets, drawn[taken]), [], prompt_logprobs, list(errors.values()))
        if paths is not None:
            result.path = Ragged.from_rows([[] if bad else path for path, bad in zip(paths, failed, strict=True)])
        asking = np.flatnonzero((self._state.logprobs[rows.slots] != NO_LOGPROBS) & ~failed)
        wanted = []
        for row in asking.tolist():
            index = np.flatnonzero(taken[starts[row] : starts[row + 1]]) + starts[row]
            wanted.append(
                Wanted(int(self._state.logprobs[rows.slots[row]]), index + first, drawn[index].astype(np.int64))
            )
        values = logprobs(logits, wanted, self._size)
        result.logprobs = [RowLogprobs(row, value) for row, value in zip(asking.tolist(), values, strict=True)]
        return result

    def _change(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, bool]:
        """The logits after masks and processors, and whether sampled rows have been divided by their temperatures."""
        state = self._state
        span = slice(int(rows.starts[0]), int(rows.starts[-1]))
        slots = rows.row_slots[span]
        early = np.flatnonzero(rows.positions[span] < state.min_tokens[slots]) + span.start
        selected = [np.flatnonzero(wants[slots]) + span.start for wants in state.wants]
        for number, processor in enumerate(self._processors):
            if processor.keeps_argmax:
                selected[number] = selected[number][~state.greedy[rows.row_slots[selected[number]]]]
        if rows.bitmask is None and not len(early) and not any(map(len, selected)):
            return logits, False
        # Logprobs are of the raw logits, and are taken last, when it is known which rows count.
        keep = logits.dtype != torch.float32 or bool((state.logprobs[rows.slots] != NO_LOGPROBS).any())
        work = logits.to(torch.float32, copy=True) if keep else logits
        if rows.bitmask is not None:
            apply_bitmask(work[span], rows.bitmask[span])
        for row in early.tolist():
            ids = state.stop_ids[int(rows.row_slots[row])]
            work[row, torch.from_numpy(ids.astype(np.int64)).to(work.device)] = -torch.inf
        for processor, chosen in zip(self._processors, selected, strict=True):
            if len(chosen) and not processor.keeps_argmax:
                work = _apply(processor, work, rows, chosen)
        scaled = False
        for processor, chosen in zip(self._processors, selected, strict=True):
            if len(chosen) and processor.keeps_argmax:
                if not scaled:
                    sampled = span.start + np.flatnonzero(~state.greedy[slots])
                    temperature = torch.from_numpy(state.temperature[rows.row_slots[sampled]]).to(work.device)
                    work[torch.from_numpy(sampled).to(work.device)] /= temperature[:, None]
                    scaled = True
                work = _apply(processor, work, rows, chosen)
        return work, scaled

    def _draw(self, logits: Tensor, scaled: bool, rows: SampleRows) -> tuple[Int32, Float32]:
        """A token for each row that belongs to a sampling row, drafts included, and the largest of its logits."""
        span = slice(int(rows.starts[0]), int(rows.starts[-1]))
        logits, slots, positions = logits[span], rows.row_slots[span], rows.positions[span]
        if fused(logits):
            return self._draw_fused(logits, scaled, slots, positions)
        greedy = self._state.greedy[slots]
        drawn, highest = np.zeros(len(slots), np.int32), np.zeros(len(slots), np.float32)
        if greedy.any():
            ids, values = argmax(logits, self._size)
            drawn[:], highest[:] = ids.cpu().numpy(), values.float().cpu().numpy()
        sampled = np.flatnonzero(~greedy)
        for at in range(0, len(sampled), _BLOCK):
            block = sampled[at : at + _BLOCK]
            part = logits if len(block) == len(logits) else logits[torch.from_numpy(block).to(logits.device)]
            ids, values = self._draw_block(part, scaled, slots[block], positions[block])
            drawn[block], highest[block] = ids.cpu().numpy(), values.cpu().numpy()
        return drawn, highest

    def _draw_fused(self, logits: Tensor, scaled: bool, slots: Int32, positions: Int32) -> tuple[Int32, Float32]:
        """All rows at once, whose parameters go to the device, and whose tokens come back, in one copy each."""
        from trivet_kernels.triton.sampling import draw, parameters

        state = self._state
        temperature = np.ones(len(slots), np.float32) if scaled else state.temperature[slots]
        params = parameters(
            np.where(state.greedy[slots], np.float32(0), temperature),
            state.top_k[slots],
            state.top_p[slots],
            state.min_p[slots],
            state.seed[slots],
            positions.astype(np.int64),
            pin=logits.is_cuda,
        )
        drawn = draw(logits, self._size, params.to(logits.device)).cpu().numpy()
        return drawn[0], drawn[1].view(np.float32)

    def _draw_block(self, logits: Tensor, scaled: bool, slots: Int32, positions: Int32) -> tuple[Tensor, Tensor]:
        def column(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).to(logits.device)

        state, block = self._state, kernels.grouped(logits, self._size)
        if not scaled:
            temperature = column(state.temperature[slots])[:, None]
            # Division keeps the order, so the largest stay the largest.
            block.values.div_(temperature)
            block.maxima.div_(temperature)
        highest = block.highest
        ids = torch.zeros(len(slots), dtype=torch.int64, device=logits.device)
        sound = highest.isfinite().nonzero()[:, 0]
        if len(sound) < len(slots):
            block = kernels.GroupedLogits(block.values[sound], block.maxima[sound])
            kept = sound.cpu().numpy()
            slots, positions = slots[kept], positions[kept]
        if len(sound):
            cut = kernels.survivors(
                block, column(state.top_k[slots]), column(state.top_p[slots]), column(state.min_p[slots])
            )
            ids[sound] = kernels.draw(block, *cut, column(state.seed[slots]), column(positions.astype(np.int64)))
        return ids, highest

    def _prompt_logprobs(
        self, logits: Tensor, rows: SampleRows, errors: dict[int, RequestFailure]
    ) -> list[PromptLogprobs]:
        wanted = [
            Wanted(
                int(self._state.prompt_logprobs[slot]),
                np.arange(row, row + count),
                rows.tokens[slot, start : start + count].astype(np.int64),
            )
            for slot, _, start, row, count in rows.prompt_rows
        ]
        out = []
        for (slot, epoch, start, _, _), values in zip(
            rows.prompt_rows, logprobs(logits, wanted, self._size), strict=True
        ):
            if np.isnan(values.logprobs).any():
                errors[slot] = self._failure(slot, "the model produced NaN logits for the prompt")
            else:
                out.append(PromptLogprobs(slot, epoch, start, values))
        return out

    def _failure(self, slot: int, message: str) -> RequestFailure:
        return RequestFailure(slot, int(self._state.epoch[slot]), message)

    def _complaint(self, highest: float, row: int, rows: SampleRows) -> str:
        """Why no token can be drawn from a logits row, whose largest value is not finite."""
        slot = int(rows.row_slots[row])
        processors = [
            f"logits processor {type(processor).__name__}"
            for processor, wants in zip(self._processors, self._state.wants, strict=True)
            if wants[slot]
        ]
        if highest != -np.inf:
            what = "NaN" if np.isnan(highest) else "infinite"
            return f"the logits are {what}" + (f" (after {', '.join(processors)})" if processors else "")
        masks = []
        if rows.bitmask is not None and bool((rows.bitmask[row] != -1).any()):
            masks.append("structured_outputs")
        if rows.positions[row] < self._state.min_tokens[slot]:
            masks.append("min_tokens")
        masks += processors
        if masks:
            return f"no token is left to draw: everything is masked by {' and '.join(masks)}"
        return "the model gives no token a probability: all logits are -inf"


def _apply(processor: LogitsProcessor, logits: Tensor, rows: SampleRows, chosen: Int64) -> Tensor:
    changed = processor.apply(logits, rows, torch.from_numpy(chosen).to(logits.device))
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        got = f"a tensor {list(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
        raise TypeError(
            f"logits processor {type(processor).__name__}: apply must return the logits {list(logits.shape)}, got {got}"
        )
    return changed


def _verify(drawn: Int32, starts: Int32, rows: SampleRows) -> tuple[Bool, list[list[int]] | None]:
    """Which of the ``drawn`` tokens are accepted, and each row's accepted drafts (None unless they form trees)."""
    if len(drawn) == len(rows.slots):
        return np.ones(len(drawn), np.bool_), None if rows.draft_parents is None else [[] for _ in rows.slots]
    taken = np.zeros(len(drawn), np.bool_)
    taken[starts[:-1]] = True
    paths: list[list[int]] = [[] for _ in rows.slots]
    for row in np.flatnonzero(np.diff(starts) > 1).tolist():
        begin, end = int(starts[row]), int(starts[row + 1])
        parents = None if rows.draft_parents is None else rows.draft_parents.row(row)
        paths[row] = follow(drawn[begin:end].tolist(), rows.drafts.row(row), parents)
        taken[begin + 1 + np.array(paths[row], np.int64)] = True
    return taken, None if rows.draft_parents is None else paths
