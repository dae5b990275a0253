"""Tests of samplers: what a request's parameters do to its logits before a token is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from trivet.roles import Sampler
from trivet.testing.suites._base import promised, require
from trivet.testing.suites._sample_rows import Row
from trivet.testing.suites._sampler_bench import KNOWN_IDS, Logits, SamplerBench


class SamplerChanges(SamplerBench):
    """Biases, lists of allowed tokens, bad words, penalties, and logprobs of tokens by id."""

    def check_greedy(self, changes: dict[str, Any], expected: Any, words: Sequence[Sequence[int]] = ()) -> None:
        """Greedy tokens of a request that has generated 5, 6, 7, alone, with drafts, and beside one without changes.

        Args:
            changes: Parameters.
            expected: Called with logits ``[KNOWN_IDS]`` and the output before a row; returns them changed.
            words: The token sequences of bad words.
        """
        rng = np.random.default_rng(16)
        for _ in range(self.examples):
            sampler, output = self.bound(), [5, 6, 7]
            self.add(sampler, 1)
            self.add(sampler, 4, words=words, **changes)
            logits = self.random_logits(rng, 3)
            logits[:, :12] += 1.5
            row, plain = Row(4, 3, logits), Row(1, 3, self.random_logits(rng))
            tokens: list[int] = []
            for index in range(3):
                changed = expected(logits[index, :KNOWN_IDS].astype(np.float64), [*output, *tokens])
                tokens.append(int(changed.argmax()))
            row.drafts = tokens[:2]
            alone = Row(4, 3, logits[:1])
            found = self.tokens(self.draw(sampler, [alone]))
            found += self.tokens(self.draw(sampler, [plain, row]))
            wanted = [tokens[:1], [int(plain.logits[0, :KNOWN_IDS].argmax())], tokens]
            require(
                found == wanted,
                "parameters change the logits of their own request, with the tokens that precede each row",
                Sampler.sample,
                params=changes,
                found=found,
                expected=wanted,
            )

    @promised("logit_bias")
    def test_logit_bias(self) -> None:
        """Numbers are added to the logits of tokens."""

        def expected(logits: Logits, _output: list[int]) -> Logits:
            logits[[3, 50]] += [4.0, -100.0]
            return logits

        self.check_greedy({"logit_bias": {3: 4.0, 50: -100.0}}, expected)

    @promised("allowed_token_ids")
    def test_allowed_token_ids(self) -> None:
        """No other tokens are drawn."""
        allowed = [1, 8, 9, 31, 32, 59]

        def expected(logits: Logits, _output: list[int]) -> Logits:
            return np.where(np.isin(np.arange(KNOWN_IDS), allowed), logits, -np.inf)

        self.check_greedy({"allowed_token_ids": allowed}, expected)

    @promised("bad_words")
    def test_bad_words(self) -> None:
        """The last token of a sequence is not drawn where the output ends with those before it."""
        words = [[8], [7, 9], [6, 7, 10], [5, 11], [4, 5, 6, 7, 3], *([n, n] for n in range(12))]

        def expected(logits: Logits, output: list[int]) -> Logits:
            for *start, last in words:
                if len(start) <= len(output) and output[len(output) - len(start) :] == start:
                    logits[last] = -np.inf
            return logits

        self.check_greedy({"bad_words": ["x"]}, expected, words)

    @promised("repetition_penalty")
    def test_repetition_penalty(self) -> None:
        """Positive logits of tokens in prompt and output are divided, others multiplied."""

        def expected(logits: Logits, output: list[int]) -> Logits:
            seen = sorted({0, 1, 2, 3, 4, *output})
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
            return logits

        self.check_greedy({"repetition_penalty": 1.5}, expected)

    @promised("frequency_penalty")
    def test_frequency_penalty(self) -> None:
        """Subtracted as often as a token is in the output."""

        def expected(logits: Logits, output: list[int]) -> Logits:
            for token, count in Counter(output).items():
                logits[token] -= 1.25 * count
            return logits

        self.check_greedy({"frequency_penalty": 1.25}, expected)

    @promised("presence_penalty")
    def test_presence_penalty(self) -> None:
        """Subtracted from tokens that are in the output."""

        def expected(logits: Logits, output: list[int]) -> Logits:
            logits[sorted(set(output))] += 0.75
            return logits

        self.check_greedy({"presence_penalty": -0.75}, expected)

    @promised("logprob_token_ids")
    def test_logprobs_of_tokens_by_id(self) -> None:
        """They come last, in the order in which they are asked for."""
        sampler, logits = self.bound(), self.random_logits(np.random.default_rng(17))
        self.add(sampler, 2, logprob_token_ids=[9, 3])
        self.add(sampler, 3, logprob_token_ids=[40], logprobs=1)
        sampled = self.draw(sampler, [Row(2, 0, logits), Row(3, 0, logits)])
        best = int(logits[0, :KNOWN_IDS].argmax())
        found = [entry.values.token_ids.tolist() for entry in sampled.logprobs]
        wanted = [[[best, 9, 3]], [[best, best, 40]]]
        require(
            found == wanted,
            "the drawn token, the likeliest ones, then those of logprob_token_ids",
            "trivet.result.TokenLogprobs",
            found=found,
            expected=wanted,
        )
        for entry, ids in zip(sampled.logprobs, wanted, strict=True):
            values = np.asarray(entry.values.logprobs)[0]
            differences = logits[0, ids[0]].astype(np.float64) - logits[0, best]
            require(
                np.allclose(values - values[0], differences, atol=1e-4),
                "logprobs of tokens by id are of the raw model",
                "trivet.result.TokenLogprobs",
                found=values.tolist(),
            )
