"""The sampler: one pass over the logits of all rows, whatever their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from trivet.plan import Bool, Float32, Int32, Int64, NewRequest, Ragged, Task
from trivet.result import PromptLogprobs, RequestFailure, RowLogprobs, TokenLogprobs
from trivet.roles import Sampled, Sampler
from trivet_kernels.sampling import DrawParams, draw, likeliest
from trivet_kernels.transfer import to_device, to_host
from trivet_sampler._changes import Changer, constrained_rows
from trivet_sampler._logprobs import Logprobs, Wanted
from trivet_sampler._state import NO_LOGPROBS, SlotState
from trivet_sampler._verify import follow

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.context import WorkerContext
    from trivet.roles import LogitsProcessor, SampleRows

#: parameters that forbid tokens and change no numbers
_MASKS = frozenset({"structured_outputs", "allowed_token_ids", "bad_words", "min_tokens"})


class TorchSampler(Sampler):
    """Draws by Gumbel-max with noise that is a function of seed, output position and token id.

    The order on each row: raw logprobs, float32, grammar, allowed ids, bad words, min_tokens, logit_bias, repetition,
    frequency and presence penalty, processors that change the argmax, temperature, processors that keep it, min_p,
    top_k, top_p, draw. Greedy rows take the likeliest token, the lowest id of equals.
    """

    fields: ClassVar[frozenset[str]] = frozenset(
        {
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
            "logprob_token_ids",
            "logit_bias",
            "allowed_token_ids",
            "bad_words",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        }
    )

    def __init__(self, context: WorkerContext | None = None, options: None = None) -> None:
        self._processors: list[LogitsProcessor] = []
        self._state = SlotState(0, 0, 0)
        self._changer = Changer(self._state, self._processors)
        self._size = 0

    def bind(
        self, vocab_size: int, tokenizer_size: int, max_num_seqs: int, processors: Sequence[LogitsProcessor]
    ) -> None:
        self._size = min(vocab_size, tokenizer_size)
        self._processors = list(processors)
        self._state = SlotState(max_num_seqs, vocab_size, len(self._processors))
        self._changer = Changer(self._state, self._processors)

    def add(self, request: NewRequest) -> None:
        if self._state.epoch[request.slot] >= 0:
            self.remove(request.slot)
        self._state.add(request)
        if request.task == Task.GENERATE:
            for number, processor in enumerate(self._processors):
                if processor.add(request):
                    self._state.wants[number, request.slot] = True
                    self._state.special.add(request.slot)

    def remove(self, slot: int) -> None:
        wanted = np.flatnonzero(self._state.wants[:, slot]).tolist()
        self._state.clear(slot)
        for number in wanted:
            self._processors[number].remove(slot)

    def sample(self, logits: Tensor, rows: SampleRows) -> Sampled:
        if self._takes_likeliest(rows) and (tokens := likeliest(logits, self._size)) is not None:
            return Sampled(Ragged(rows.starts, tokens))
        # A device is waited for once: what follows a draw there gets its tokens from it, rejected drafts' included.
        drawn = self._draw(logits, rows)
        asking = np.flatnonzero(self._state.logprobs[rows.slots] != NO_LOGPROBS).tolist()
        wanted = [self._wanted(rows, row) for row in asking]
        prompts, prompt_tokens = self._wanted_prompts(rows, drawn.shape[1])
        pending = Logprobs(logits, [*wanted, *prompts], _joined(drawn[0], prompt_tokens), self._size)
        host, *arrays = to_host(drawn, *pending.tensors)
        values = pending.values(arrays)
        return self._judged(
            rows, host[0], host[1].view(np.float32), asking, values[: len(asking)], values[len(asking) :]
        )

    def _takes_likeliest(self, rows: SampleRows) -> bool:
        """Whether all that is asked for is the likeliest token of every row of logits."""
        count = len(rows.slots)
        return (
            not self._state.special
            and rows.bitmask is None
            and not rows.prompt_rows
            and 0 < count == len(rows.row_slots)
            and rows.draft_parents is None
        )

    def _judged(
        self,
        rows: SampleRows,
        drawn: Int32,
        highest: Float32,
        asking: list[int],
        own: list[TokenLogprobs],
        prompts: list[TokenLogprobs],
    ) -> Sampled:
        """What becomes of tokens ``drawn`` from logits with such ``highest`` values; ``own`` are the logprobs of the
        sampling rows ``asking``."""
        errors: dict[int, RequestFailure] = {}
        prompt_logprobs = self._prompt_logprobs(rows, prompts, errors)
        if not len(rows.slots):
            return Sampled(Ragged.empty(), [], prompt_logprobs, list(errors.values()))
        starts, first = rows.starts - rows.starts[0], int(rows.starts[0])
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
        for row, values in zip(asking, own, strict=True):
            if not failed[row]:
                kept = taken[starts[row] : starts[row + 1]]
                chosen = TokenLogprobs(values.token_ids[kept], values.logprobs[kept], values.ranks[kept])
                result.logprobs.append(RowLogprobs(row, chosen))
        return result

    def _draw(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """A token for each row that belongs to a sampling row, drafts included, and the largest of its logits, as
        :func:`trivet_kernels.sampling.draw` has them."""
        if not len(rows.slots):
            return torch.empty(2, 0, dtype=torch.int32, device=logits.device)
        changed = self._changer.change(logits, rows)
        state, first, last = self._state, int(rows.starts[0]), int(rows.starts[-1])
        slots = rows.row_slots[first:last]
        source = np.arange(first, last)
        temperature = np.where(state.greedy[slots], np.float32(0), state.temperature[slots])
        if changed is not None:
            at = changed.rows - first
            source[at] = ~np.arange(len(at))
            temperature[at[changed.scaled]] = 1
        params = DrawParams(
            temperature,
            state.top_k[slots],
            state.top_p[slots],
            state.min_p[slots],
            state.seed[slots],
            rows.positions[first:last].astype(np.int64),
        )
        return draw(logits, None if changed is None else changed.logits, source, self._size, params)

    def _wanted(self, rows: SampleRows, row: int) -> Wanted:
        """The logprobs that a sampling row's request wants of all tokens that are drawn for it."""
        slot = int(rows.slots[row])
        index = np.arange(rows.starts[row], rows.starts[row + 1], dtype=np.int64)
        k, asked = int(self._state.logprobs[slot]), self._state.logprob_ids.get(slot)
        return Wanted(k, index, index - int(rows.starts[0]), asked)

    def _wanted_prompts(self, rows: SampleRows, first: int) -> tuple[list[Wanted], Int64]:
        """The prompt logprobs that requests want, and their tokens, which stand from place ``first`` on."""
        wanted, tokens = [], [np.empty(0, np.int64)]
        for slot, _, start, row, count in rows.prompt_rows:
            k = int(self._state.prompt_logprobs[slot])
            wanted.append(Wanted(k, np.arange(row, row + count), np.arange(first, first + count)))
            tokens.append(rows.tokens[slot, start : start + count].astype(np.int64))
            first += count
        return wanted, np.concatenate(tokens)

    def _prompt_logprobs(
        self, rows: SampleRows, found: list[TokenLogprobs], errors: dict[int, RequestFailure]
    ) -> list[PromptLogprobs]:
        out = []
        for (slot, epoch, start, _, _), values in zip(rows.prompt_rows, found, strict=True):
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
        names = ["structured_outputs"] if constrained_rows(rows)[row] else []
        names += self._state.changing(slot, int(rows.positions[row]))
        processors = [
            f"logits processor {type(processor).__name__}"
            for processor, wants in zip(self._processors, self._state.wants, strict=True)
            if wants[slot]
        ]
        if highest != -np.inf:
            what = "NaN" if np.isnan(highest) else "infinite"
            # Masks make no numbers.
            names = [name for name in names if name not in _MASKS] + processors
            return f"the logits are {what}" + (f" (after {', '.join(names)})" if names else "")
        # Penalties and biases mask nothing, unless they are so large that nothing else can be the reason.
        names = [name for name in names if name in _MASKS] + processors or names
        if names:
            return f"no token is left to draw: everything is masked by {' and '.join(names)}"
        return "the model gives no token a probability: all logits are -inf"


def _joined(drawn: Tensor, others: Int64) -> Tensor:
    """Ids as ``[n]`` int64, where the drawn ones are."""
    ids = drawn.long()
    return torch.cat([ids, to_device(others, ids.device)]) if len(others) else ids


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
