"""What the tests of samplers share: requests in slots, batches of rows, values judged in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trivet.plan import NewRequest, Ragged
from trivet.roles import LogitsProcessor, Sampled, Sampler, SampleRows
from trivet.testing.suites._base import ArraySuite, require
from trivet.testing.suites._sample_rows import Row, packed_bits, sample_rows_of
from trivet_schemas.sampling import SamplingParams

VOCAB, KNOWN_IDS, SLOTS = 64, 60, 16

Logits = NDArray[np.float32]


class SamplerBench(ArraySuite):
    """Puts requests into slots and rows into batches."""

    role: ClassVar[str] = "sampler"
    top_k: ClassVar[bool] = True
    top_p: ClassVar[bool] = True
    min_p: ClassVar[bool] = True
    min_tokens: ClassVar[bool] = True
    logprobs: ClassVar[bool] = True
    prompt_logprobs: ClassVar[bool] = True
    logprob_token_ids: ClassVar[bool] = True
    logit_bias: ClassVar[bool] = True
    allowed_token_ids: ClassVar[bool] = True
    bad_words: ClassVar[bool] = True
    repetition_penalty: ClassVar[bool] = True
    frequency_penalty: ClassVar[bool] = True
    presence_penalty: ClassVar[bool] = True
    #: drafts in trees
    trees: ClassVar[bool] = True
    #: grammars' bitmasks
    bitmasks: ClassVar[bool] = True
    #: logits processors
    processors: ClassVar[bool] = True

    def bound(self, *processors: LogitsProcessor) -> Sampler:
        """A sampler of :data:`VOCAB` logits, of which the tokenizer knows the first :data:`KNOWN_IDS`."""
        sampler: Sampler = self.make(self.worker)
        sampler.bind(VOCAB, KNOWN_IDS, SLOTS, processors)
        return sampler

    def add(
        self, sampler: Sampler, slot: int, *, seed: int = 0, words: Sequence[Sequence[int]] = (), **fields: Any
    ) -> NewRequest:
        """A request in a slot; its prompt is 0, 1, 2, 3, 4. ``words`` are the token sequences of its bad words."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 100} | fields)
        tokens = np.arange(5, dtype=np.int32)
        stop_ids = np.array(params.stop_token_ids, np.int32)
        request = NewRequest(
            f"r{slot}", slot, 100 + slot, tokens, 5, 0, [], params=params, seed=seed, stop_ids=stop_ids
        )
        request.bad_words = Ragged.from_rows(list(words)) if words else None
        sampler.add(request)
        return request

    def draw(self, sampler: Sampler, rows: Sequence[Row], prompt_rows: Sequence[Any] = ()) -> Sampled:
        """Sample a batch; ``prompt_rows`` are (slot, first position, logits) of prompt logprobs. A request's output is
        5, 6, 7, … up to its row's position."""
        lengths = np.full(SLOTS, 5, np.int32)
        for row in rows:
            lengths[row.slot] = 5 + row.position
        tokens = np.tile(np.arange(max(64, lengths.max()), dtype=np.int32) % KNOWN_IDS, (SLOTS, 1))
        prompts = [(slot, 100 + slot, start, logits) for slot, start, logits in prompt_rows]
        logits, sample_rows = sample_rows_of(rows, tokens, lengths, prompts)
        if any(row.bits is not None for row in rows):
            bits = packed_bits(rows, len(logits))
            sample_rows.bitmask, sample_rows.constrained = self.tensor(bits), (bits != -1).any(axis=1)
        return sampler.sample(self.tensor(logits), sample_rows)

    @staticmethod
    def random_logits(rng: Any, rows: int = 1, spread: float = 2.0) -> Logits:
        """Random logits, all different."""
        logits: Logits = (rng.standard_normal((rows, VOCAB)) * spread).astype(np.float32)
        return logits

    def tokens(self, sampled: Sampled) -> list[list[int]]:
        """Accepted tokens per row; no row failed."""
        require(
            not sampled.errors,
            "rows with finite logits and an allowed token do not fail",
            Sampled,
            errors=sampled.errors,
        )
        return [sampled.accepted.row(i).tolist() for i in range(len(sampled.accepted))]

    def draws(self, logits: Logits, count: int, **fields: Any) -> NDArray[np.int64]:
        """``count`` draws from one distribution, at positions 0, 1, 2, … of requests with different seeds."""
        sampler = self.bound()
        for slot in range(SLOTS):
            self.add(sampler, slot, seed=1000 + slot, **fields)
        found = []
        for position in range(-(-count // SLOTS)):
            batch = [Row(slot, position, logits) for slot in range(SLOTS)]
            found += [row[0] for row in self.tokens(self.draw(sampler, batch))]
        return np.array(found[:count])

    def check_set(self, logits: Logits, allowed: set[int], what: str, **fields: Any) -> None:
        """Draws stay within a set and reach its likely members."""
        drawn = set(self.draws(logits, 600, temperature=1.0, **fields).tolist())
        require(drawn <= allowed, f"{what} keeps the other tokens out", Sampler.sample, outside=sorted(drawn - allowed))
        inside = sorted(allowed)
        shares = softmax(logits[0, inside].astype(np.float64))
        missing = [t for t, share in zip(inside, shares, strict=True) if share > 0.02 and t not in drawn]
        require(not missing, f"{what} leaves these tokens in", Sampler.sample, never_drawn=missing)

    def check_failure(self, sampled: Sampled, good: list[list[int]], slot: int, word: str) -> None:
        """One row failed, the others are as they were."""
        errors = [(e.slot, e.epoch) for e in sampled.errors]
        require(
            errors == [(slot, 100 + slot)] and word in sampled.errors[0].message.lower() and sampled.errors[0].message,
            "a row with NaN, or no token left, is reported in errors with its slot, epoch and a message",
            Sampled,
            errors=sampled.errors,
        )
        found = [sampled.accepted.row(i).tolist() for i in range(len(good))]
        expected = [[] if i == slot else tokens for i, tokens in enumerate(good)]
        require(
            found == expected,
            "a failed row accepts nothing, and its neighbours what they would have",
            Sampled,
            found=found,
            expected=expected,
        )

    def check_logprobs(self, values: Any, logits: Logits, tokens: list[int], count: int) -> None:
        """Reported values against a log-softmax in float64."""
        shape = (len(tokens), 1 + count)
        ids, logprobs = np.asarray(values.token_ids), np.asarray(values.logprobs)
        where = "trivet.result.TokenLogprobs"
        require(ids.shape == logprobs.shape == shape, "arrays are [n, 1 + k]", where, shape=ids.shape, expected=shape)
        for i, token in enumerate(tokens):
            # Padding rows of the LM head may count in the normalisation, or not.
            known = np.log(softmax(logits[i, :KNOWN_IDS].astype(np.float64)))
            whole = np.log(softmax(logits[i].astype(np.float64)))
            expected_ids = [token, *np.argsort(-known)[:count].tolist()]
            close = any(np.allclose(logprobs[i], all_[expected_ids], atol=1e-4) for all_ in (known, whole))
            rank = 1 + int((known > known[token]).sum())
            require(
                ids[i].tolist() == expected_ids and close and int(values.ranks[i]) == rank,
                "logprobs are of the raw model: the token itself, then the k likeliest, and the token's rank",
                where,
                ids=ids[i].tolist(),
                expected_ids=expected_ids,
                logprobs=logprobs[i].tolist(),
                rank=int(values.ranks[i]),
                expected_rank=rank,
            )


class Force(LogitsProcessor):
    """Makes one token certain for requests that ask for it."""

    def __init__(self, suite: ArraySuite, token: int) -> None:
        self._suite, self._token = suite, token
        self.removed: list[int] = []
        self.seen: set[int] = set()

    def add(self, request: NewRequest) -> bool:
        """Whether the request asks for it."""
        return bool((request.params.extra_args or {}).get("force"))

    def remove(self, slot: int) -> None:
        """Note it."""
        self.removed.append(slot)

    def apply(self, logits: Any, rows: SampleRows, selected: Any) -> Any:
        """Raise one logit."""
        for row in self._suite.numpy(selected).tolist():
            self.seen.add(int(rows.row_slots[row]))
            logits[row, self._token] = 1000.0
        return logits


class KeepsArgmax(Force):
    """Promises what it does not keep; greedy rows are not to see it."""

    keeps_argmax = True


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of ``[n]`` logits."""
    shifted: NDArray[np.float64] = np.exp(values - values.max())
    total: float = shifted.sum()
    return np.divide(shifted, total)
