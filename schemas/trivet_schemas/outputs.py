"""What a request yields, with the class and field names of vLLM's.

Plain dataclasses: they are made for every output, and nothing in them needs validation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int | None = None
    """Rank among the vocabulary, from 1."""
    decoded_token: str | None = None
    """The token as text."""


PromptLogprobs = list[dict[int, Logprob] | None]
"""Per prompt position, token id → logprob; None at the first, which nothing predicts."""
SampleLogprobs = list[dict[int, Logprob]]
"""Per generated position, token id → logprob."""


@dataclass(slots=True)
class RequestMetrics:
    """When a request went through the engine. Times are seconds of one monotonic clock; None: not yet, or never."""

    arrival_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    """How often it lost its blocks and was computed again."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the cache."""
    num_recomputed_tokens: int = 0
    """Tokens that were computed again after preemptions."""

    @property
    def queue_seconds(self) -> float | None:
        """Arrival to the first step that ran it."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def prefill_seconds(self) -> float | None:
        """First step to the first token."""
        return _difference(self.first_token_time, self.first_scheduled_time)

    @property
    def decode_seconds(self) -> float | None:
        """First token to the end."""
        return _difference(self.finished_time, self.first_token_time)


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` outputs of a request."""

    index: int
    """Which of the ``n``."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the logprobs of the tokens; None unless logprobs were asked for."""
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None
    """Why it ended; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the end of sequence and other reasons."""

    def finished(self) -> bool:
        """Whether this output has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request that generates."""

    request_id: str
    prompt: str | None
    """The prompt as text; None if it was given as token ids."""
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    """Whether every output has ended."""
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV came from the cache."""
    error: str | None = None
    """Why the request failed; its outputs then have finish reason ``error``."""


@dataclass(slots=True)
class BeamSearchSequence:
    """A sequence that a beam search found."""

    tokens: list[int]
    """Those of the prompt, then the generated ones."""
    logprobs: SampleLogprobs
    """Per generated token the candidates among which it was chosen; the end of sequence has its entry, too."""
    cum_logprob: float = 0.0
    """Sum of the logprobs of the generated tokens, the end of sequence among them."""
    text: str | None = None
    """The text of ``tokens``; None without a tokenizer."""
    finish_reason: FinishReason | None = None
    """``stop`` at an end of sequence, ``length`` at the limit."""
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences for one prompt, best first."""

    sequences: list[BeamSearchSequence]
    error: str | None = None
    """Why the search failed; there are no sequences then."""


@dataclass(slots=True)
class PoolingOutput:
    """The pooled hidden state of a request: an array or list of floats."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a request."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Probabilities of the classes; they sum to 1."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Similarity or relevance of a pair of texts."""

    score: float


_Pooled = TypeVar("_Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[_Pooled]):
    """The outcome of a request that pools."""

    request_id: str
    outputs: _Pooled
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The outcome of an embedding request."""


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The outcome of a classification request."""


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The outcome of a scoring request."""
