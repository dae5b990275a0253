"""The output stage: from what commits changed to what users see."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trivet.output.completion import Completion
from trivet.output.logprobs import position_logprobs
from trivet_schemas.outputs import (
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from trivet_schemas.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trivet.events import CommitEvents, Finished
    from trivet.plan import Float32
    from trivet.result import PromptLogprobs, TokenLogprobs
    from trivet.roles.tokenizer import Tokenizer
    from trivet.state import Request
    from trivet.submission import Submission

Output = RequestOutput | PoolingRequestOutput[PoolingOutput]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Group:
    """A user's request: its submission and, per child, the engine's request."""

    submission: Submission
    completions: list[Completion]
    requests: list[Request | None]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    pooled: Float32 | None = None
    ended: bool = False
    error: str | None = None
    prompt_logprobs_sent: bool = False


@dataclass(slots=True, eq=False)
class _Child:
    group: _Group
    index: int
    request: Request


@dataclass(slots=True)
class _Change:
    """What one commit did to one child."""

    tokens: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    end: Finished | None = None


class OutputStage:
    """Follows requests by the engine's events, in order, and assembles their outputs.

    It may run at once or any time later, in any one thread: what it makes of a request depends only on the request's
    tokens. When it finds a stop string it says so through ``stop``; tokens and ends that the engine reports meanwhile
    are ignored.

    A request that ends with an error yields a finished output with finish reason ``error``, and the message in
    ``error``; what was generated before is kept. An exception that a request's own text causes ends this request alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stop: Callable[[Request, int, str], None],
        abort: Callable[[list[Request]], None],
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Make an empty stage.

        Args:
            tokenizer: Makes text; None: every text is empty.
            stop: Called as ``stop(request, num_tokens, stop_string)`` when an output ends before the engine knows.
            abort: Called with requests that nobody can follow any longer; some may have ended.
            eos_token_ids: The model's ends of sequence, whose text is not shown when they end an output.
        """
        self._tokenizer, self._stop, self._abort = tokenizer, stop, abort
        self._eos_ids = frozenset(eos_token_ids)
        self._children: dict[str, _Child] = {}
        self._groups: dict[str, _Group] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not been made."""
        return len(self._groups)

    def add(self, submission: Submission, index: int, request: Request) -> None:
        """Follow child ``index`` of ``submission``, which the engine has accepted as ``request``.

        To be called before any event about it is processed. An id that was used before must have ended.
        """
        group = self._groups.get(submission.request_id)
        if group is None or group.submission is not submission:
            group = self._groups[submission.request_id] = self._open(submission)
        group.requests[index] = request
        self._children[request.request_id] = _Child(group, index, request)

    def drop(self, submission: Submission) -> None:
        """Stop following; no further output is made."""
        group = self._groups.get(submission.request_id)
        if group is not None and group.submission is submission:
            self._forget(group)

    def process(self, events: CommitEvents) -> list[Output]:
        """Outputs of the requests that ``events`` changed, as their output kind asks for, in order of the events."""
        touched: dict[int, _Group] = {}
        for request, chunk in events.prompt_logprobs:
            child = self._child(request)
            if child is not None:
                self._add_prompt_logprobs(child.group, chunk)
                touched[id(child.group)] = child.group
        for request, pooled in events.pooled:
            child = self._child(request)
            if child is not None:
                child.group.pooled = pooled.data
        for request, change in self._changes(events):
            child = self._child(request)
            if child is not None:
                self._apply(child, change)
                touched[id(child.group)] = child.group
        outputs = (self._emit(group) for group in touched.values())
        return [output for output in outputs if output is not None]

    def fail_all(self, message: str) -> list[Output]:
        """End everything that is followed with ``message``; returns the last outputs."""
        groups = list(self._groups.values())
        for group in groups:
            self._fail(group, message)
        return [output for group in groups if (output := self._emit(group)) is not None]

    # ------------------------------------------------------------------ events to state

    def _open(self, submission: Submission) -> _Group:
        params, count = submission.params, len(submission.children)
        if not isinstance(params, SamplingParams):
            return _Group(submission, [], [None], None)
        only_final = submission.output_kind is RequestOutputKind.FINAL_ONLY
        completions = [
            Completion(
                index,
                params,
                self._tokenizer,
                prompt_ids=submission.prompt_token_ids,
                eos_ids=self._eos_ids,
                only_final=only_final,
            )
            for index in range(count)
        ]
        wanted = params.prompt_logprobs is not None
        return _Group(
            submission, completions, [None] * count, [None] * len(submission.prompt_token_ids) if wanted else None
        )

    def _child(self, request: Request) -> _Child | None:
        child = self._children.get(request.request_id)
        # An id may be in use again while the end of its former request is still on the way.
        return child if child is not None and child.request is request else None

    @staticmethod
    def _changes(events: CommitEvents) -> Iterable[tuple[Request, _Change]]:
        changes: dict[int, tuple[Request, _Change]] = {}
        if events.tokens is not None:
            values, offsets = events.tokens.values.tolist(), events.tokens.offsets.tolist()
            for row, request in enumerate(events.requests):
                changes[id(request)] = (request, _Change(values[offsets[row] : offsets[row + 1]]))
            for row, logprobs in events.logprobs:
                changes[id(events.requests[row])][1].logprobs = logprobs
        for end in events.finished:
            _, change = changes.setdefault(id(end.request), (end.request, _Change()))
            change.end = end
        return changes.values()

    def _apply(self, child: _Child, change: _Change) -> None:
        group, end = child.group, change.end
        if not group.completions:
            group.ended = end is not None
            if end is not None and end.reason != "stop":
                group.error = end.message or f"the request ended with {end.reason}"
            return
        completion = group.completions[child.index]
        try:
            stopped = completion.append(change.tokens, change.logprobs, end)
        except Exception as exc:  # noqa: BLE001  # whatever one request's text causes ends this request alone
            _log.exception("request %s: its output could not be made", group.submission.request_id)
            self._fail(group, f"the output could not be made: {type(exc).__name__}: {exc}")
            self._abort([request for request in group.requests if request is not None])
            return
        if completion.finish_reason == "error" and group.error is None:
            group.error = (end.message if end is not None else None) or "the request failed"
        if stopped and end is None:
            assert isinstance(completion.stop_reason, str)
            self._stop(child.request, len(completion.token_ids), completion.stop_reason)
        group.ended = all(c.finished for c in group.completions)

    def _fail(self, group: _Group, message: str) -> None:
        for completion in group.completions:
            if not completion.finished:
                try:
                    completion.fail()
                except Exception:  # noqa: BLE001  # one request's text keeps no other from its end
                    _log.exception("request %s: it failed, and has no text either", group.submission.request_id)
        group.ended, group.error = True, group.error or message

    def _add_prompt_logprobs(self, group: _Group, chunk: PromptLogprobs) -> None:
        """Positions that are known already, because a preempted prompt was computed again, stay as they are."""
        known = group.prompt_logprobs
        if known is None:
            return
        params = group.submission.params
        shows_text = isinstance(params, SamplingParams) and params.detokenize and self._tokenizer is not None
        text = self._tokenizer.token_text if shows_text and self._tokenizer is not None else None
        count = min(len(chunk.values.ranks), len(known) - chunk.start)
        for position, found in enumerate(position_logprobs(chunk.values, count, text), chunk.start):
            if known[position] is None:
                known[position] = found

    # ------------------------------------------------------------------ state to outputs

    def _emit(self, group: _Group) -> Output | None:
        submission = group.submission
        if group.ended:
            self._forget(group)
        if not group.completions:
            return self._pooled(group) if group.ended else None
        outputs: list[CompletionOutput]
        prompt_logprobs = None if group.prompt_logprobs is None else list(group.prompt_logprobs)
        match submission.output_kind:
            case RequestOutputKind.FINAL_ONLY:
                outputs = _returned(group) if group.ended else []
            case RequestOutputKind.DELTA:
                outputs = [delta for c in group.completions if (delta := c.delta()) is not None]
                if group.prompt_logprobs_sent:
                    prompt_logprobs = None
                group.prompt_logprobs_sent = group.prompt_logprobs_sent or bool(outputs)
            case _:
                has_news = group.ended or any(c.token_ids for c in group.completions)
                outputs = [c.snapshot() for c in group.completions] if has_news else []
        if not outputs:
            return None
        metrics = _metrics(group)
        return RequestOutput(
            submission.request_id,
            submission.prompt,
            submission.prompt_token_ids,
            prompt_logprobs,
            outputs,
            group.ended,
            metrics,
            metrics.num_cached_tokens,
            group.error,
        )

    def _pooled(self, group: _Group) -> Output:
        submission, metrics = group.submission, _metrics(group)
        if group.pooled is None and group.error is None:
            group.error = "the model returned no pooled output"
        return PoolingRequestOutput(
            submission.request_id,
            PoolingOutput(group.pooled),
            submission.prompt_token_ids,
            True,
            metrics.num_cached_tokens,
            metrics,
            group.error,
        )

    def _forget(self, group: _Group) -> None:
        if self._groups.get(group.submission.request_id) is group:
            del self._groups[group.submission.request_id]
        for request in group.requests:
            if request is not None and (child := self._children.get(request.request_id)) and child.group is group:
                del self._children[request.request_id]


def _returned(group: _Group) -> list[CompletionOutput]:
    """The outputs of a request that has ended; of more than it returns, the best, which are numbered by rank."""
    params, completions = group.submission.params, group.completions
    if isinstance(params, SamplingParams) and params.num_sampled > params.n:
        ranked = sorted(completions, key=lambda c: (c.finish_reason == "error", -c.total_logprob, c.index))
        return [replace(c.snapshot(), index=rank) for rank, c in enumerate(ranked[: params.n])]
    return [c.snapshot() for c in completions]


def _metrics(group: _Group) -> RequestMetrics:
    """Times of all children together: the first scheduling and token, the last end."""
    requests = [request for request in group.requests if request is not None]
    first = requests[0]
    scheduled = [r.first_scheduled_time for r in requests if r.first_scheduled_time is not None]
    tokens = [r.first_token_time for r in requests if r.first_token_time is not None]
    ends = [r.finished_time for r in requests if r.finished_time is not None]
    finished = None
    if group.ended:  # a stop string is found before the engine ends the request
        finished = max(ends) if len(ends) == len(requests) else time.monotonic()
    return RequestMetrics(
        first.arrival_time,
        min(scheduled, default=None),
        min(tokens, default=None),
        finished,
        sum(r.num_preemptions for r in requests),
        max(0, first.num_cached_tokens),
        sum(r.num_recomputed_tokens for r in requests),
    )
