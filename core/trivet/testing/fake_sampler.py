"""A sampler in numpy, one row at a time: greedy or seeded, drafts in chains and trees, grammar masks, prompt
logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trivet.plan import NewRequest, Ragged
from trivet.result import PromptLogprobs, RequestFailure, RowLogprobs, TokenLogprobs
from trivet.roles import LogitsProcessor, Sampled, Sampler, SampleRows
from trivet.testing.fake_model import mix


class FakeSampler(Sampler):
    """Draws by argmax of logits plus noise that depends on (seed, output position, token id) only."""

    fields: ClassVar[frozenset[str]] = frozenset({"temperature", "seed", "logprobs", "prompt_logprobs"})

    def __init__(self, context: Any = None, options: Any = None) -> None:
        self._requests: dict[int, NewRequest] = {}
        self._processors: list[LogitsProcessor] = []
        self._wanted: dict[int, set[int]] = {}

    def bind(
        self, vocab_size: int, tokenizer_size: int, max_num_seqs: int, processors: Sequence[LogitsProcessor]
    ) -> None:
        """Keep the sizes."""
        self._size = min(vocab_size, tokenizer_size)
        self._processors = list(processors)

    def add(self, request: NewRequest) -> None:
        """A request enters its slot."""
        self._requests[request.slot] = request
        self._wanted[request.slot] = {i for i, p in enumerate(self._processors) if p.add(request)}

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""
        del self._requests[slot]
        for i in self._wanted.pop(slot):
            self._processors[i].remove(slot)

    def sample(self, logits: Any, rows: SampleRows) -> Sampled:
        """Draw row by row."""
        raw = np.asarray(logits, np.float64)[:, : self._size].copy()
        for i, processor in enumerate(self._processors):
            selected = self._selected(i, processor, rows)
            if len(selected):
                logits = processor.apply(logits, rows, selected)
        out: list[list[int]] = []
        paths: list[list[int]] = []
        result = Sampled(Ragged.empty())
        for s, slot in enumerate(rows.slots.tolist()):
            request = self._requests[slot]
            first = int(rows.starts[s])
            drafts = rows.drafts.row(s).tolist() if len(rows.drafts.values) else []
            parents = list(range(-1, len(drafts) - 1))
            if rows.draft_parents is not None and drafts:
                parents = rows.draft_parents.row(s).tolist()
            if np.isnan(logits[first : first + 1 + len(drafts)]).any():
                result.errors.append(RequestFailure(slot, request.epoch, "the model produced NaN logits"))
                out.append([])
                paths.append([])
                continue
            accepted, path, used = self._walk(logits, rows, s, request, drafts, parents)
            if not accepted:
                result.errors.append(RequestFailure(slot, request.epoch, "no token is left to draw"))
            out.append(accepted)
            paths.append(path)
            if accepted and getattr(request.params, "logprobs", None) is not None:
                values = self._logprobs(raw[used], accepted, request.params.logprobs)
                result.logprobs.append(RowLogprobs(s, values))
        for slot, epoch, start, row, count in rows.prompt_rows:
            targets = np.asarray(rows.tokens)[slot, start : start + count].tolist()
            wanted = self._requests[slot].params.prompt_logprobs
            values = self._logprobs(raw[row : row + count], targets, wanted)
            result.prompt_logprobs.append(PromptLogprobs(slot, epoch, start, values))
        result.accepted = Ragged.from_rows(out)
        result.path = Ragged.from_rows(paths)
        return result

    def _walk(
        self, logits: Any, rows: SampleRows, s: int, request: NewRequest, drafts: list[int], parents: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        first = int(rows.starts[s])
        accepted: list[int] = []
        path: list[int] = []
        used: list[int] = []
        node = -1
        while True:
            row = first + 1 + node
            token = self._draw(logits[row], rows, row, request)
            if token is None:
                return [], [], []
            accepted.append(token)
            used.append(row)
            child = next((j for j, p in enumerate(parents) if p == node and drafts[j] == token), None)
            if child is None:
                return accepted, path, used
            path.append(child)
            node = child

    def _selected(self, index: int, processor: LogitsProcessor, rows: SampleRows) -> NDArray[np.int64]:
        """The logits rows that a processor sees: greedy ones only if it may change the likeliest token."""
        found = []
        for row in range(int(rows.starts[-1])):
            slot = int(rows.row_slots[row])
            greedy = not getattr(self._requests[slot].params, "temperature", 0.0)
            if index in self._wanted[slot] and not (greedy and processor.keeps_argmax):
                found.append(row)
        return np.array(found, np.int64)

    def _draw(self, values: Any, rows: SampleRows, row: int, request: NewRequest) -> int | None:
        scores = np.array(values[: self._size], np.float64)
        if rows.bitmask is not None:
            bits = np.unpackbits(np.asarray(rows.bitmask[row], np.int32).view(np.uint8), bitorder="little")
            scores[bits[: self._size] == 0] = -np.inf
        if scores.max() == -np.inf:
            return None
        temperature = getattr(request.params, "temperature", 0.0)
        if temperature > 0:
            key = mix(np.array([request.seed & (2**63 - 1), int(rows.positions[row])], np.uint64))
            noise = mix(key[0] ^ mix(key[1:] + np.arange(self._size, dtype=np.uint64)))
            uniform = ((noise >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
            scores = scores / temperature - np.log(-np.log(uniform))
        return int(scores.argmax())

    @staticmethod
    def _logprobs(logits: Any, tokens: Sequence[int], count: int) -> TokenLogprobs:
        shifted = logits - logits.max(axis=1, keepdims=True)
        values = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        order = np.argsort(-values, axis=1, kind="stable")[:, : max(count, 0)]
        chosen = np.asarray(tokens).reshape(-1, 1)
        ids = np.concatenate([chosen, order], axis=1)
        picked = np.take_along_axis(values, ids, axis=1)
        ranks = 1 + (values > picked[:, :1]).sum(axis=1)
        return TokenLogprobs(ids.astype(np.int32), picked.astype(np.float32), ranks.astype(np.int32))
