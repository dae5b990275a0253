"""Conformance of ``logits_processor`` providers: one row at a time is the reference for the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from trivet.errors import RequestError
from trivet.plan import NewRequest
from trivet.roles import LogitsProcessor
from trivet.testing.suites._base import ArraySuite, promised, require
from trivet.testing.suites._sample_rows import Row, sample_rows_of
from trivet_schemas.sampling import SamplingParams

SLOTS, LONGEST = 8, 128

Logits = NDArray[np.float32]


class LogitsProcessorSuite(ArraySuite):
    """Applies a processor to batches of requests that want it and requests that do not, drafts included."""

    role: ClassVar[str] = "logits_processor"
    #: ``extra_args`` of requests that the processor applies to
    cases: ClassVar[Sequence[Mapping[str, Any] | None]]
    #: ``extra_args`` of a request that it does not apply to; None with :attr:`always` False: no ``extra_args``
    idle: ClassVar[Mapping[str, Any] | None] = None
    #: it applies to every request
    always: ClassVar[bool] = False
    #: ``extra_args`` that ``validate`` refuses
    refused: ClassVar[Sequence[Mapping[str, Any]]] = ()
    vocab_size: ClassVar[int] = 64

    def reference(self, logits: Logits, tokens: Sequence[int], num_prompt: int, params: Any) -> Logits | None:
        """What a row ``[vocab_size]`` after ``tokens`` becomes, computed in the most obvious way; None (the default):
        the processor itself, one row at a time, is the reference."""
        return None

    # ------------------------------------------------------------------ running

    def built(self) -> LogitsProcessor:
        """A new processor."""
        processor: LogitsProcessor = self.make(self.worker)
        return processor

    def params(self, extra_args: Mapping[str, Any] | None) -> SamplingParams:
        """Parameters of a request."""
        return SamplingParams(max_tokens=30, extra_args=None if extra_args is None else dict(extra_args))

    def apply(self, processor: LogitsProcessor, requests: Mapping[int, _Request], rows: Sequence[Row]) -> Logits:
        """Changed logits of a batch, after checking that no other row changed."""
        tokens, lengths = np.zeros((SLOTS, LONGEST), np.int32), np.zeros(SLOTS, np.int32)
        for slot, request in requests.items():
            tokens[slot, : len(request.tokens)] = request.tokens
            lengths[slot] = len(request.tokens)
        logits, sample_rows = sample_rows_of(rows, tokens, lengths)
        wanted = [slot for slot, request in requests.items() if request.wanted]
        selected = np.flatnonzero(np.isin(sample_rows.row_slots, wanted)).astype(np.int64)
        if not len(selected):
            return logits
        kept = logits.copy()
        changed = processor.apply(self.tensor(logits), sample_rows, self.tensor(selected))
        found: Logits = self.numpy(changed)
        require(
            found.shape == kept.shape and found.dtype == np.float32,
            "apply returns the logits, [L, vocab_size] float32",
            LogitsProcessor.apply,
            shape=found.shape,
            dtype=found.dtype,
        )
        others = np.setdiff1d(np.arange(len(kept)), selected)
        same = np.array_equal(found[others], kept[others])
        require(same, "only rows in selected may change", LogitsProcessor.apply, selected=selected.tolist())
        if processor.keeps_argmax:
            moved = np.flatnonzero(found.argmax(axis=1) != kept.argmax(axis=1)).tolist()
            require(not moved, "keeps_argmax promises that the likeliest token stays", LogitsProcessor, rows=moved)
        return np.array(found, np.float32)

    def enter(self, processor: LogitsProcessor, slot: int, request: _Request) -> None:
        """Tell the processor of a request in a slot."""
        token_ids = np.array(request.tokens, np.int32)
        new = NewRequest(f"r{slot}", slot, 1, token_ids, request.num_prompt, 0, [], params=request.params, seed=slot)
        request.wanted = processor.add(new)
        expected = request.applies
        require(
            request.wanted == expected,
            "add returns whether the processor applies to the request",
            LogitsProcessor.add,
            extra_args=request.params.extra_args,
            returned=request.wanted,
        )

    def alone(self, request: _Request, tokens: Sequence[int], logits: Logits) -> Logits:
        """One row of one request that has ``tokens``: the reference."""
        if not request.applies:
            return logits
        given = self.reference(logits.copy(), tokens, request.num_prompt, request.params)
        if given is not None:
            return np.asarray(given, np.float32)
        processor, single = self.built(), _Request(list(tokens), request.num_prompt, request.params, request.applies)
        self.enter(processor, 0, single)
        row = Row(0, len(tokens) - request.num_prompt, logits[None])
        found: Logits = self.apply(processor, {0: single}, [row])[0]
        return found

    def requests(self, rng: Any) -> dict[int, _Request]:
        """A request per slot; every third does not want the processor, unless it applies to all."""
        found: dict[int, _Request] = {}
        shift = int(rng.integers(3))
        for slot in range(SLOTS):
            applies = self.always or (slot + shift) % 3 != 2
            extra = self.cases[slot % len(self.cases)] if applies else self.idle
            length = int(rng.integers(1, 20))
            tokens = rng.integers(0, self.vocab_size, length + int(rng.integers(0, 8))).tolist()
            found[slot] = _Request(tokens, length, self.params(extra), applies)
        return found

    def compare(self, found: Logits, expected: Logits, how: str, **details: object) -> None:
        """Rows agree with the reference."""
        same = np.allclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        different = np.flatnonzero(~np.isclose(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)).tolist()
        require(
            same,
            f"a row's logits depend on its own request and tokens alone ({how})",
            LogitsProcessor.apply,
            tokens_that_differ=different[:10],
            found=found[different[:10]].tolist(),
            expected=expected[different[:10]].tolist(),
            **details,
        )

    # ------------------------------------------------------------------ tests

    def test_parameters_that_are_accepted(self) -> None:
        """``validate`` accepts what the cases give, without a worker's state."""
        processor = self.built()
        for extra in (*self.cases, self.idle):
            processor.validate(self.params(extra))

    @promised("refused")
    def test_parameters_that_are_refused(self) -> None:
        """``validate`` refuses wrong ``extra_args`` before anything is allocated for the request."""
        processor = self.built()
        for extra in self.refused:
            with pytest.raises(RequestError):
                processor.validate(self.params(extra))

    def test_rows_of_a_batch(self) -> None:
        """Each row gets what it gets alone; rows of requests that do not want the processor stay."""
        rng = np.random.default_rng(0)
        processor, requests = self.built(), self.requests(rng)
        for slot, request in requests.items():
            self.enter(processor, slot, request)
        for _ in range(self.examples):
            order = rng.permutation(SLOTS).tolist()[: int(rng.integers(1, SLOTS + 1))]
            rows = [Row(s, requests[s].position, self._logits(rng)) for s in order]
            kept = [row.logits.copy() for row in rows]
            found = self.apply(processor, requests, rows)
            for row, before, after in zip(rows, kept, found, strict=True):
                request = requests[row.slot]
                self.compare(after, self.alone(request, request.tokens, before[0]), "in a batch", slot=row.slot)
            for slot in order:
                if len(requests[slot].tokens) < LONGEST - 8:
                    requests[slot].tokens.append(int(rng.integers(self.vocab_size)))

    @pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
    def test_draft_rows(self, trees: bool) -> None:
        """Before draft row j come the known tokens and the drafts that lead to it."""
        rng = np.random.default_rng(1)
        processor, requests = self.built(), self.requests(rng)
        for slot, request in requests.items():
            self.enter(processor, slot, request)
        rows = []
        for slot in range(SLOTS):
            count = int(rng.integers(0, 6))
            drafts = rng.integers(0, self.vocab_size, count).tolist()
            parents = [int(rng.integers(-1, n)) for n in range(count)] if trees else None
            rows.append(Row(slot, requests[slot].position, self._logits(rng, 1 + count), drafts, parents))
        kept = [row.logits.copy() for row in rows]
        found = self.apply(processor, requests, rows)
        at = 0
        for row, before in zip(rows, kept, strict=True):
            request = requests[row.slot]
            for index in range(len(before)):
                expected = self.alone(request, request.tokens + row.path(index), before[index])
                self.compare(found[at], expected, "as a draft", drafts=row.drafts, parents=row.parents, draft_row=index)
                at += 1

    def test_slots_are_used_again(self) -> None:
        """Nothing of a request is left when it has gone; one that was preempted continues as it was."""
        rng = np.random.default_rng(2)
        processor = self.built()
        for _ in range(4):
            requests = self.requests(rng)
            for slot, request in requests.items():
                self.enter(processor, slot, request)
            for again in (False, True):
                rows = [Row(slot, request.position, self._logits(rng)) for slot, request in requests.items()]
                kept = [row.logits.copy() for row in rows]
                found = self.apply(processor, requests, rows)
                for row, before, after in zip(rows, kept, found, strict=True):
                    request = requests[row.slot]
                    self.compare(after, self.alone(request, request.tokens, before[0]), "in a slot used before")
                for slot, request in requests.items():
                    request.tokens.append(int(rng.integers(self.vocab_size)))
                    if request.wanted:
                        processor.remove(slot)
                    if not again:
                        self.enter(processor, slot, request)

    def _logits(self, rng: Any, rows: int = 1) -> Logits:
        logits: Logits = (3 * rng.standard_normal((rows, self.vocab_size))).astype(np.float32)
        return logits


class _Request:
    """A request with its known tokens, and whether the processor is to apply to it."""

    def __init__(self, tokens: list[int], num_prompt: int, params: SamplingParams, applies: bool) -> None:
        self.tokens, self.num_prompt, self.params, self.applies = tokens, num_prompt, params, applies
        self.wanted = False

    @property
    def position(self) -> int:
        """The output position of the next token."""
        return len(self.tokens) - self.num_prompt
