"""What a request must produce, by a direct loop over its tokens: no cache, no batch, no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from machine_kit import Alternating, matcher_of

from trivet.testing.fake_model import mix, reference_logits, reference_states
from trivet_schemas.sampling import PoolingParams, SamplingParams

VOCAB = 64


@dataclass
class Wanted:
    """A request as it was submitted, its continuation as far as it has been asked for, and what was seen of it."""

    request_id: str
    prompt: list[int]
    params: SamplingParams | PoolingParams
    windows: Sequence[int | None]
    eos: frozenset[int]
    adapter: str | None = None
    request: Any = None
    streamed: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, list[float]] = field(default_factory=dict)
    pooled: list[Any] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    asked: tuple[str, int] | None = None  #: how the test ended it (abort, stop) and after how many tokens
    _tokens: list[int] = field(default_factory=list)
    _reason: str | None = None
    _matcher: Alternating | None = None

    def __post_init__(self) -> None:
        structured = getattr(self.params, "structured_outputs", None)
        if structured is not None and not structured.regex.startswith("nonsense"):
            self._matcher = matcher_of(structured.regex)

    @property
    def broken(self) -> bool:
        """Whether its grammar does not compile."""
        structured = getattr(self.params, "structured_outputs", None)
        return structured is not None and self._matcher is None

    @property
    def unfinished(self) -> bool:
        return not self.ends

    def whole(self) -> tuple[list[int], str]:
        """All tokens and the reason of the end."""
        while self._reason is None:
            self._grow()
        return self._tokens, self._reason

    def check(self) -> None:
        """The end, the tokens and everything that was reported are right."""
        assert len(self.ends) == 1, f"{self.request_id} ended {self.ends}"
        reason, request = self.ends[0], self.request
        assert request.finish_reason == reason
        assert request.slot == -1
        if isinstance(self.params, PoolingParams):
            assert request.output_ids == []
            assert len(self.pooled) == (reason == "stop"), f"{self.request_id} {reason} {request.message}"
            for vector in self.pooled:
                state = reference_states(self.prompt, self.windows, self.adapter)[-1:] >> np.uint64(11)
                assert np.allclose(vector, state.astype(np.float64) / 2.0**53)
            return
        assert not self.pooled
        if self.broken:
            assert reason in ("error", "abort")
            assert request.output_ids == []
            return
        tokens, natural = self.whole()
        if self.asked is not None and self.asked[0] == "stop":
            assert self.streamed[: self.asked[1]] == request.output_ids
            assert reason == "stop"
        else:
            assert request.output_ids == self.streamed
        note = f"{self.request_id}, {reason}: {request.message}"
        assert request.output_ids == tokens[: len(request.output_ids)], note
        if reason in ("stop", "length") and self.asked is None:
            assert (reason, request.output_ids) == (natural, tokens), self.request_id
        if reason == "length" or (reason == "stop" and self.asked is None):
            self._check_prompt_logprobs()

    def _check_prompt_logprobs(self) -> None:
        if self.params.prompt_logprobs is None:
            assert not self.prompt_logprobs
            return
        assert sorted(self.prompt_logprobs) == list(range(1, len(self.prompt)))
        logits = reference_logits(self.prompt, VOCAB, self.windows, self.adapter)
        for position, values in self.prompt_logprobs.items():
            row = logits[position - 1]
            expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
            assert abs(values[0] - expected[self.prompt[position]]) < 1e-4, (self.request_id, position)

    def _grow(self) -> None:
        logits = reference_logits(self.prompt + self._tokens, VOCAB, self.windows, self.adapter)[-1]
        scores = np.array(logits)
        if self._matcher is not None:
            allowed = np.array([self._matcher.allowed(t) for t in range(VOCAB)])
            scores[~allowed] = -np.inf
        if self.params.temperature > 0:
            key = mix(np.array([self.request.seed & (2**63 - 1), len(self._tokens)], np.uint64))
            noise = mix(key[0] ^ mix(key[1:] + np.arange(VOCAB, dtype=np.uint64)))
            uniform = ((noise >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
            scores = scores / self.params.temperature - np.log(-np.log(uniform))
        token = int(scores.argmax())
        if self._take(token) or self._matcher is None:
            return
        for forced in self._matcher.forced():
            if self._take(int(forced)):
                return

    def _take(self, token: int) -> bool:
        self._tokens.append(token)
        if self._matcher is not None:
            assert self._matcher.accept(token)
        stops = set(self.params.stop_token_ids) | (set() if self.params.ignore_eos else self.eos)
        if token in stops or (self._matcher is not None and self._matcher.is_terminated()):
            self._reason = "stop"
        elif len(self._tokens) >= self.request.max_total - len(self.prompt):
            self._reason = "length"
        return self._reason is not None
