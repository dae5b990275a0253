"""One growing output: its tokens, text, logprobs and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trivet.output.logprobs import position_logprobs
from trivet.output.stops import StopFinder
from trivet_schemas.outputs import CompletionOutput, FinishReason, Logprob

if TYPE_CHECKING:
    from trivet.events import Finished
    from trivet.result import TokenLogprobs
    from trivet.roles.tokenizer import Detokenizer, Tokenizer
    from trivet_schemas.sampling import SamplingParams


class Completion:
    """Takes accepted tokens in order, however they are grouped, and decides where the output ends.

    Rules, token by token:

    - the text of the token that stopped the generation (end of sequence or stop token) is shown only with
      ``include_stop_str_in_output``; its id always belongs to the output;
    - a stop string counts if its last character belongs to a token after the first ``min_tokens``; the output ends with
      that token and the text is cut before the stop string (or behind it);
    - what comes later, tokens or an end for another reason, changes nothing any more;
    - text held back, because a stop string or a character might begin there, is given out when the generation ends.
    """

    __slots__ = (
        "_deferred",
        "_detokenizer",
        "_eos_ids",
        "_finder",
        "_fresh",
        "_min_tokens",
        "_params",
        "_pieces",
        "_prompt_ids",
        "_sent_end",
        "_sent_tokens",
        "_tokenizer",
        "finish_reason",
        "index",
        "logprobs",
        "stop_reason",
        "token_ids",
        "total_logprob",
    )

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        prompt_ids: Sequence[int] = (),
        eos_ids: frozenset[int] = frozenset(),
        only_final: bool = False,
    ) -> None:
        """Start with no token.

        Args:
            index: Which of the request's ``n`` outputs.
            params: The request's parameters.
            tokenizer: Turns tokens into text; without one, or with ``detokenize`` off, the text stays empty.
            prompt_ids: The prompt, which decides about a leading space.
            eos_ids: The model's ends of sequence.
            only_final: Nobody looks before the end: text that no stop string needs is made at once, then.
        """
        self.index = index
        self.token_ids: list[int] = []
        #: sum of the tokens' logprobs, as far as the engine reports them
        self.total_logprob = 0.0
        reported = params.logprobs is not None or params.logprob_token_ids is not None
        self.logprobs: list[dict[int, Logprob]] | None = [] if reported else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._prompt_ids = prompt_ids
        self._eos_ids = eos_ids
        self._min_tokens = params.min_tokens
        self._finder = StopFinder(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self._deferred = only_final and self._finder is None
        self._detokenizer: Detokenizer | None = None
        # The text in parts, so that a token costs as much late in a long output as early; and what no delta has yet.
        self._pieces: list[str] = []
        self._fresh: list[str] = []
        self._sent_tokens = 0
        self._sent_end = False

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None

    def append(self, tokens: list[int], logprobs: TokenLogprobs | None = None, end: Finished | None = None) -> bool:
        """Take ``tokens`` and, if the engine ended the request with them, ``end``.

        Returns whether a stop string ended the output here; no effect once it has ended.
        """
        if self.finish_reason is not None:
            return False
        shown = len(tokens) - self._hides_last(tokens, end)
        used = len(tokens)
        if self._finder is not None and self._tokenizer is not None:
            used = self._find_stop(self._finder, tokens, shown)
        else:
            if not self._deferred and self._tokenizer is not None and shown:
                self._write(self._text_of(tokens[:shown]))
            self.token_ids += tokens
        if logprobs is not None:
            self._add_logprobs(logprobs, used)
        if end is not None and self.finish_reason is None:
            self._end(end, hidden=len(tokens) - shown)
        return self._finder is not None and self._finder.found is not None

    def fail(self) -> None:
        """End with ``error``; what has been given out stays, and text that waited for the end is made.

        Raises:
            Exception: Whatever the tokenizer raises; the output has ended all the same.
        """
        self.finish_reason = "error"
        if self._deferred and self._tokenizer is not None and self.token_ids:
            self._write(self._text_of(self.token_ids))

    def snapshot(self) -> CompletionOutput:
        """Everything so far, as a copy."""
        return self._output(self.text, list(self.token_ids), None if self.logprobs is None else list(self.logprobs))

    def delta(self) -> CompletionOutput | None:
        """What is new since the call before, the end among it; None if nothing is."""
        text, tokens = "".join(self._fresh), self.token_ids[self._sent_tokens :]
        if not text and not tokens and self._sent_end == self.finished:
            return None
        logprobs = None if self.logprobs is None else self.logprobs[self._sent_tokens :]
        self._fresh, self._sent_tokens, self._sent_end = [], len(self.token_ids), self.finished
        return self._output(text, tokens, logprobs)

    def _output(self, text: str, tokens: list[int], logprobs: list[dict[int, Logprob]] | None) -> CompletionOutput:
        total = None if self.logprobs is None else self.total_logprob
        return CompletionOutput(self.index, text, tokens, total, logprobs, self.finish_reason, self.stop_reason)

    def _write(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._fresh.append(text)

    def _hides_last(self, tokens: list[int], end: Finished | None) -> bool:
        """Whether the last of ``tokens`` is a stop token whose text is not shown."""
        if end is None or end.reason != "stop" or not tokens or self._params.include_stop_str_in_output:
            return False
        last = tokens[-1]
        return last == end.stop_reason or (end.stop_reason is None and last in self._eos_ids)

    def _find_stop(self, finder: StopFinder, tokens: list[int], shown: int) -> int:
        """Push ``tokens`` one by one; returns how many belong to the output."""
        for count, token in enumerate(tokens, 1):
            self.token_ids.append(token)
            if count > shown:
                continue
            self._write(finder.push(self._text_of([token]), armed=len(self.token_ids) > self._min_tokens))
            if finder.found is not None:
                self.finish_reason, self.stop_reason = "stop", finder.found
                return count
        return len(tokens)

    def _end(self, end: Finished, hidden: int) -> None:
        reason: Any = end.reason
        self.finish_reason, self.stop_reason = reason, end.stop_reason
        if self._tokenizer is None:
            return
        if self._deferred:
            shown = self.token_ids[: len(self.token_ids) - hidden]
            self._write(self._text_of(shown) if shown else "")
        rest = "" if self._detokenizer is None else self._detokenizer.flush()
        if self._finder is None:
            self._write(rest)
            return
        # A character that never became whole is text of the last token, unless the generation did not end by itself.
        armed = reason in {"stop", "length"} and len(self.token_ids) > self._min_tokens
        self._write(self._finder.push(rest, armed=armed))
        if self._finder.found is None:
            self._write(self._finder.flush())
        else:
            self.finish_reason, self.stop_reason = "stop", self._finder.found

    def _text_of(self, tokens: list[int]) -> str:
        if self._detokenizer is None:
            assert self._tokenizer is not None
            self._detokenizer = self._tokenizer.detokenizer(
                self._prompt_ids,
                skip_special_tokens=self._params.skip_special_tokens,
                spaces_between_special_tokens=self._params.spaces_between_special_tokens,
            )
        return self._detokenizer.push(tokens)

    def _add_logprobs(self, values: TokenLogprobs, count: int) -> None:
        self.total_logprob += float(values.logprobs[:count, 0].sum())
        if self.logprobs is None:  # wanted for ranking only
            return
        text = None if self._tokenizer is None else self._tokenizer.token_text
        found = position_logprobs(values, count, text, len(self._params.logprob_token_ids or ()))
        self.logprobs += found
        # Tokens that a grammar forced were not drawn and have no logprob.
        self.logprobs += ({} for _ in range(count - len(found)))
