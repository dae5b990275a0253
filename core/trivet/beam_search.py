"""Beam search on top of requests of one token: an engine's prefix cache shares what beams have in common.

After each token the ``beam_width`` most likely extensions of all beams of a prompt are kept; those that the end of
sequence completes are set aside and take no beam. In the end the best ``beam_width`` of both are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivet.submission import Submission
from trivet_schemas.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from trivet_schemas.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trivet.roles.tokenizer import Tokenizer

Candidates = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
class _Beam:
    tokens: list[int]
    cum_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    end: int | None = None  #: the end of sequence that completed it


class BeamSearch:
    """The search for one prompt; :attr:`beams` are to be extended, :meth:`advance` takes their candidates."""

    def __init__(
        self, submission: Submission, params: BeamSearchParams, *, eos_token_ids: frozenset[int], max_model_len: int
    ) -> None:
        """Start with the prompt of ``submission`` as the only beam.

        Args:
            submission: The prompt, its cache tags and its priority.
            params: Width, limits and ranking.
            eos_token_ids: What completes a beam, unless ``ignore_eos``.
            max_model_len: Most tokens of prompt and output.
        """
        self.submission, self.params = submission, params
        self._eos_ids: frozenset[int] = frozenset() if params.ignore_eos else eos_token_ids
        prompt = submission.prompt_token_ids
        self._longest = min(len(prompt) + params.max_tokens, max_model_len)
        self._completed: list[_Beam] = []
        self.beams = [_Beam(list(prompt))]
        self.error: str | None = None

    @property
    def done(self) -> bool:
        """Whether nothing that the beams could still become would be among the best."""
        if self.error is not None or not self.beams or len(self.beams[0].tokens) >= self._longest:
            return True
        width = self.params.beam_width
        if len(self._completed) < width:
            return False
        worst = sorted((self._score(beam) for beam in self._completed), reverse=True)[width - 1]
        return max(self._bound(beam) for beam in self.beams) <= worst

    def step_submissions(self, step_params: SamplingParams, step: int) -> list[Submission]:
        """A request of one token for every beam."""
        own = self.submission
        ids = [f"{own.request_id}.{step}.{index}" for index in range(len(self.beams))]
        return [
            Submission(
                request_id,
                None,
                beam.tokens,
                step_params,
                ((request_id, step_params),),
                own.priority,
                RequestOutputKind.FINAL_ONLY,
                own.cache_tags,
            )
            for request_id, beam in zip(ids, self.beams, strict=True)
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Go on with what the requests of all beams brought, in their order."""
        for output in outputs:
            (completion,) = output.outputs
            if output.error is not None or completion.finish_reason == "abort" or not completion.logprobs:
                self.error = self.error or output.error or f"a beam's request ended with {completion.finish_reason}"
        if self.error is None:
            self.advance([(output.outputs[0].logprobs or [{}])[0] for output in outputs])

    def advance(self, found: Sequence[Candidates]) -> None:
        """Extend every beam by its candidates (token → logprob) and keep the best."""
        # Only what is kept gets lists of its own: of wide beams over long texts the rest would fill the memory.
        extended: list[tuple[float, int, int, dict[int, Logprob]]] = []
        for index, (beam, candidates) in enumerate(zip(self.beams, found, strict=True)):
            shown = dict(candidates)
            for token, value in shown.items():
                if value.logprob == float("-inf"):
                    continue
                total = beam.cum_logprob + value.logprob
                if token in self._eos_ids:
                    self._completed.append(_Beam(beam.tokens, total, [*beam.logprobs, shown], end=token))
                else:
                    extended.append((total, index, token, shown))
        # All are equally long; equally likely ones stay in order.
        extended.sort(key=lambda one: -one[0])
        self.beams = [
            _Beam([*self.beams[index].tokens, token], total, [*self.beams[index].logprobs, shown])
            for total, index, token, shown in extended[: self.params.beam_width]
        ]

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """The best sequences, best first."""
        if self.error is not None:
            return BeamSearchOutput([], self.error)
        ranked = sorted([*self._completed, *self.beams], key=lambda beam: -self._score(beam))
        return BeamSearchOutput([self._sequence(beam, tokenizer) for beam in ranked[: self.params.beam_width]])

    def _sequence(self, beam: _Beam, tokenizer: Tokenizer | None) -> BeamSearchSequence:
        shows_end = self.params.include_stop_str_in_output
        tokens = [*beam.tokens, beam.end] if beam.end is not None and shows_end else list(beam.tokens)
        text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=not shows_end)
        reason: Any = "length" if beam.end is None else "stop"
        return BeamSearchSequence(tokens, list(beam.logprobs), beam.cum_logprob, text, reason)

    def _score(self, beam: _Beam) -> float:
        """As in vLLM the length counts the prompt and not the end of sequence."""
        return float(beam.cum_logprob / len(beam.tokens) ** self.params.length_penalty)

    def _bound(self, beam: _Beam) -> float:
        """No continuation of ``beam`` scores higher: logprobs only add up, and the length is within limits."""
        length = self._longest if self.params.length_penalty > 0 else len(beam.tokens)
        return float(beam.cum_logprob / length**self.params.length_penalty)


def step_params(params: BeamSearchParams, eos_token_ids: frozenset[int], vocab_size: int) -> SamplingParams:
    """Parameters of the requests of one token, with so many candidates that ``beam_width`` of them do not complete the
    beam.

    Raises:
        TypeError: If ``params`` are of another class.
    """
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
    width = params.beam_width
    ends = 0 if params.ignore_eos else len(eos_token_ids)
    count = min(max(2 * width, width + ends), vocab_size)
    return SamplingParams(max_tokens=1, temperature=params.temperature, logprobs=count, ignore_eos=True)


def whole_params(params: BeamSearchParams, step: SamplingParams) -> SamplingParams:
    """Parameters of a request that takes as much room as the longest beam, to validate a prompt with."""
    return step.replace(max_tokens=params.max_tokens)


def search_all(
    searches: Sequence[BeamSearch],
    params: SamplingParams,
    run: Callable[[list[Submission]], Sequence[Any]],
    report: Callable[[BeamSearch], None],
) -> None:
    """Advance all searches in step, every beam of all of them in one batch.

    Args:
        searches: Any number of them.
        params: From :func:`step_params`.
        run: Runs requests to their ends and returns their outputs in order.
        report: Called with each search that is done.
    """
    going, step = list(searches), 0
    while going:
        submissions = [search.step_submissions(params, step) for search in going]
        outputs = iter(run([one for several in submissions for one in several]))
        for search, several in zip(going, submissions, strict=True):
            search.take([next(outputs) for _ in several])
            if search.done:
                report(search)
        going, step = [search for search in going if not search.done], step + 1
