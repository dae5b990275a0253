"""The way in: every request is checked whole before anything is allocated for it."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from trivet.bad_words import bad_word_sequences
from trivet.errors import RequestError
from trivet.events import Finished, RequestsAdded, RequestsFinished
from trivet.plan import Int32, Ragged, Task
from trivet.roles import Wait
from trivet.state import PromptRange, Request
from trivet.wire import encode_params
from trivet_schemas.errors import ParameterError
from trivet_schemas.sampling import ENGINE_FIELDS, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from trivet.assembly import Parts
    from trivet.context import Hold

_T = TypeVar("_T", int, float)
#: fields of the parameters whose content is checked by plugins only
_FREE_FIELDS = frozenset({"structured_outputs", "extra_args"})
_TASKS = {"embed": Task.EMBED, "score": Task.SCORE, "classify": Task.CLASSIFY}


class Admissions:
    """Validates and queues requests; tells observers; explains waits."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._fields = parts.info.sampling_fields | ENGINE_FIELDS
        self._seeds = np.random.default_rng(parts.config.seed)
        self._count = 0
        self._added: list[Request] = []

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: Any,
        *,
        priority: int | None = None,
        arrival_time: float | None = None,
        prompt: str | None = None,
        adapter: str | None = None,
        cache_tags: Mapping[str, bytes] | None = None,
        parent: str | None = None,
        ranges: Sequence[PromptRange] = (),
        extra: Mapping[str, bytes] | None = None,
    ) -> Request:
        """See :meth:`trivet.engine.Engine.add_request`."""
        life = self._p.lifecycle
        for param, text in (("request_id", request_id), ("adapter", adapter), ("parent", parent), ("prompt", prompt)):
            if text is not None or param == "request_id":
                _check_text(param, text)
        if request_id in life.requests:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", param="request_id")
        ids, max_total, task = self.validate(prompt_token_ids, params)
        seed = getattr(params, "seed", None)
        tags, more = _check_bytes("cache_tags", cache_tags), _check_bytes("extra", extra)
        if adapter is not None:
            tags.setdefault("adapter", adapter.encode())
        if getattr(params, "cache_salt", None):
            tags.setdefault("cache_salt", params.cache_salt.encode())
        if parent is not None and parent in life.requests:
            _check_parent(life.requests[parent], ids, tags, ranges)
        for name, given in (("adapter", adapter is not None), ("ranges", len(ranges) > 0)):
            if given and name not in self._p.info.model.takes:
                raise RequestError(f"{name}: the selected model does not take it", param=name)
        _check_ranges(ranges, len(ids))
        priority = _check_number("priority", priority, int, params.priority)
        arrival_time = _check_number("arrival_time", arrival_time, float, time.monotonic())
        request = Request(
            request_id,
            ids,
            params,
            max_total,
            int(self._seeds.integers(2**63)) if seed is None else seed,
            index=self._count,
            task=task,
            priority=priority,
            arrival_time=arrival_time,
            prompt=prompt,
            adapter=adapter,
            cache_tags=tags,
            whole_prompt=self._needs_whole_prompt(params),
            parent=parent,
            bad_words=self._bad_words(params) if task == Task.GENERATE else None,
            ranges=tuple(ranges),
            extra=more,
        )
        life.accept(request)
        self._count += 1
        self._added.append(request)
        return request

    def validate(self, prompt_token_ids: Sequence[int], params: Any) -> tuple[Int32, int, Task]:
        """The prompt's ids, the most tokens that the request may grow to, and its task; raises RequestError."""
        ids = self._prompt(prompt_token_ids)
        max_total, task = self._params(params, ids)
        if not self._p.cache.fits(max_total):
            stats = self._p.cache.stats()
            raise RequestError(
                f"a request of {len(ids)} prompt tokens that may grow to {max_total} can never fit into the KV cache "
                f"of {stats.total} blocks; shorten it, lower max_tokens, or raise plugins.cache.memory",
                param="prompt",
            )
        return ids, max_total, task

    def tell(self) -> None:
        """Report what was queued since the last call."""
        if self._added:
            added, self._added = self._added, []
            if self._p.hooks.has_observers("requests_added"):
                self._p.hooks.requests_added(RequestsAdded(added))

    def take_ended(self) -> list[Finished]:
        """Requests that ended since the last call, once observers know of them."""
        ended = self._p.lifecycle.take_ended()
        if ended:
            self.tell()
            if self._p.hooks.has_observers("requests_finished"):
                self._p.hooks.requests_finished(RequestsFinished(ended))
        return ended

    def explain(self, request_id: str, *, history: bool = False) -> Wait | None:
        """See :meth:`trivet.engine.Engine.explain`."""
        wait = self._explain(request_id)
        if wait is None or not history:
            return wait
        return replace(wait, history=self._p.lifecycle.history.waits(request_id))

    def _explain(self, request_id: str) -> Wait | None:
        self._p.lifecycle.apply_releases()
        request = self._p.lifecycle.requests.get(request_id)
        if request is None:
            return None
        if request.holds:
            return _held(list(request.holds.values()))
        reason = self._p.planner.step_holds.get(request_id)
        if reason is not None:
            return Wait("hold", f"for this step: {reason}")
        return self._p.scheduler.explain(request)

    def abort(self, request_ids: Sequence[str], reason: str) -> None:
        """See :meth:`trivet.engine.Engine.abort`."""
        life = self._p.lifecycle
        for request_id in request_ids:
            request = life.requests.get(request_id)
            if request is not None:
                life.finish(request, reason)

    def stop(self, request_id: str, num_tokens: int, stop_reason: str | None) -> None:
        """See :meth:`trivet.engine.Engine.stop`."""
        request = self._p.lifecycle.requests.get(request_id)
        if request is None:
            return
        known = self._p.table.num_output(request)
        if not 0 <= num_tokens <= known:
            raise RequestError(
                f"{request_id!r} cannot be stopped after {num_tokens} tokens: it has {known}", param="num_tokens"
            )
        self._p.lifecycle.finish(request, "stop", stop_reason=stop_reason, num_output=num_tokens)

    def _needs_whole_prompt(self, params: SamplingParams | PoolingParams) -> bool:
        if isinstance(params, PoolingParams):
            return (params.pooling_type or self._p.info.model.pooling_type) != "last"
        return params.prompt_logprobs is not None

    # ------------------------------------------------------------------ checks

    def _prompt(self, prompt_token_ids: Sequence[int]) -> Int32:
        try:
            ids = np.asarray(prompt_token_ids)
        except (ValueError, TypeError):  # rows of different lengths; an object that is no array and will not say so
            ids = np.empty((0, 0), np.object_)
        if ids.ndim == 1 and not len(ids) and isinstance(prompt_token_ids, Sequence | np.ndarray):
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(
                f"prompt_token_ids must be a list of integers, got {ids.dtype} {ids.shape}", param="prompt"
            )
        vocab = self._p.vocab_size
        outside = ids[(ids < 0) | (ids >= vocab)]
        if len(outside):
            raise RequestError(
                f"token id {int(outside[0])} is outside the vocabulary (0 to {vocab - 1}); was the prompt encoded with "
                "another model's tokenizer?",
                param="prompt",
            )
        return ids.astype(np.int32)

    def _params(self, params: Any, ids: Int32) -> tuple[int, Task]:
        limit, count = self._p.max_model_len, len(ids)
        if not isinstance(params, SamplingParams | PoolingParams):
            raise RequestError(
                f"sampling parameters must be a SamplingParams, got {type(params).__name__}", param="params"
            )
        _check_params(params)
        if isinstance(params, PoolingParams):
            if params.task not in self._p.info.model.tasks:
                tasks = ", ".join(self._p.info.model.tasks)
                raise RequestError(
                    f"task {params.task!r} is not one of this model's: {tasks} (classes and scores need a model with a "
                    "head for them, such as one of an architecture ...ForSequenceClassification)",
                    param="task",
                )
            if params.dimensions is not None and params.dimensions > (self._p.info.model.hidden_size or math.inf):
                raise RequestError(
                    f"dimensions: {params.dimensions} exceeds the {self._p.info.model.hidden_size} of this model's "
                    "embeddings",
                    param="dimensions",
                )
            if count > limit:
                raise RequestError(f"the prompt has {count} tokens and the context holds {limit}", param="prompt")
            return count, _TASKS[params.task]
        if "generate" not in self._p.info.model.tasks:
            tasks = ", ".join(self._p.info.model.tasks)
            raise RequestError(
                f"this model generates no text; its tasks are {tasks} (LLM.embed, LLM.classify, LLM.score)",
                param="task",
            )
        if params.n != 1:
            raise RequestError(
                f"n: the engine takes one output per request, got {params.n}; add a request for each, with parent= the "
                "first one's id (trivet.LLM and trivet.AsyncEngine do that)",
                param="n",
            )
        if params.num_sampled != 1:
            raise RequestError(
                f"best_of: the engine takes one output per request, got {params.best_of}; trivet.LLM and "
                "trivet.AsyncEngine choose among several",
                param="best_of",
            )
        try:
            params.check_context(count, limit)
            params.check_vocabulary(self._p.vocab_size)
            params.check_logprobs(self._p.config.max_logprobs)
        except ParameterError as error:
            raise RequestError(str(error), param=error.problems[0].path) from error
        lacking = params.unsupported(self._fields)
        if params.structured_outputs is not None and any(g.validate(params) for g in self._p.grammars):
            lacking = [name for name in lacking if name != "structured_outputs"]
        if lacking:
            raise RequestError(
                f"{', '.join(lacking)}: not supported by the selected plugins (sampler and grammar); leave it out or "
                "select plugins that offer it",
                param=lacking[0],
            )
        if params.stop and self._p.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and none is selected", param="stop")
        self._bad_words(params)
        for processor in self._p.processors:
            processor.validate(params)
        return count + params.token_limit(count, limit), Task.GENERATE

    def _bad_words(self, params: SamplingParams) -> Ragged | None:
        return bad_word_sequences(params.bad_words, self._p.tokenizer, self._p.vocab_size)


def _held(holds: Sequence[Hold]) -> Wait:
    """The hold of a request in words: what for, for how long, by whom."""
    now = time.monotonic()
    numbers: dict[str, Any] = {}
    details = []
    for hold in holds:
        seconds = round(max(now - hold.since, 0.0), 3)
        numbers[f"{hold.plugin}:{hold.kind}"] = seconds
        numbers.update(hold.numbers)
        duration = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
        details.append(f"{hold.detail} ({hold.kind}, for {duration}, {hold.plugin})")
    numbers["seconds"] = max(seconds for name, seconds in numbers.items() if ":" in name)
    return Wait("hold", "; ".join(details), numbers)


# What follows would otherwise be noticed where it harms others: in the queue's order, on the way to a worker.


def _check_text(param: str, value: object) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a string, got {value!r}", param=param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} is not valid Unicode at character {error.start}: {value!r}", param=param) from None


def _check_bytes(param: str, values: Mapping[str, bytes] | None) -> dict[str, bytes]:
    values = dict(values or {})
    for key, value in values.items():
        _check_text(param, key)
        if not isinstance(value, bytes):
            raise RequestError(f"{param}[{key!r}] must be bytes, got {type(value).__name__}", param=param)
    return values


def _check_number(param: str, value: Any, kind: type[_T], default: _T) -> _T:
    if value is None:
        return default
    try:
        number = operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(number, float) and not math.isfinite(number):
        raise RequestError(f"{param} must be {'an integer' if kind is int else 'a number'}, got {value!r}", param=param)
    return kind(number)


def _check_ranges(ranges: Sequence[PromptRange], num_prompt: int) -> None:
    for one in ranges:
        if one.length < 1 or not 0 <= one.start <= num_prompt - one.length or one.offset < 0:
            raise RequestError(
                f"ranges: {one.length} positions of {one.item!r} from {one.start} on are not within the prompt of "
                f"{num_prompt} tokens",
                param="ranges",
            )


def _check_parent(parent: Request, ids: Int32, tags: Mapping[str, bytes], ranges: Sequence[PromptRange]) -> None:
    same = np.array_equal(parent.prompt_ids, ids) and parent.ranges == tuple(ranges)
    if not same or parent.cache_tags != tags:
        raise RequestError(
            f"parent: {parent.request_id!r} has another prompt, adapter or cache tags, so its blocks cannot be shared",
            param="parent",
        )


def _check_params(params: SamplingParams | PoolingParams) -> None:
    """Whether the parameters survive the way to a worker in another process."""
    if params.model_fields_set.isdisjoint(_FREE_FIELDS):
        return
    try:
        encode_params(params)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        names = ", ".join(sorted(params.model_fields_set & _FREE_FIELDS))
        raise RequestError(f"{names}: cannot be sent to a worker: {error}", param=names) from None
