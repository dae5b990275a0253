"""Structured output in the worker: constraints compiled off the loop, one matcher per slot, masks for every logits
row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.plan import Int32, NewRequest, Ragged
from trivet.result import ConstraintState, ConstraintStatus, RequestFailure, TokenLogprobs
from trivet.roles.grammar import Grammar, Matcher
from trivet.roles.sampler import Sampled, SampleRows

if TYPE_CHECKING:
    from trivet.result import RowLogprobs


@dataclass(slots=True)
class _Constrained:
    """A request with a grammar. ``future`` is None once the matcher exists, or compiling has failed."""

    request: NewRequest
    provider: Grammar | None = None
    future: Future[tuple[Matcher, float]] | None = None
    matcher: Matcher | None = None


@dataclass(slots=True)
class Advanced:
    """What advancing the matchers made of a step's tokens, per sampling row."""

    accepted: Ragged
    logprobs: list[RowLogprobs]
    forced: list[Int32]  #: tokens that must follow; without rows where no request has a grammar
    errors: list[RequestFailure] = field(default_factory=list)


class GrammarPool:
    """Compiles in a bounded pool of threads and owns the matchers. All methods are called on the worker's step thread.

    Args:
        providers: The grammar providers, in configuration order; the first that serves a constraint compiles it.
        vocab_size: Width of the logits; a mask has ``ceil(vocab_size / 32)`` words.
        threads: Most constraints that are compiled at once.
    """

    def __init__(self, providers: Sequence[Grammar], vocab_size: int, threads: int = 2) -> None:
        self._providers = tuple(providers)
        self._words = -(-vocab_size // 32)
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._slots: dict[int, _Constrained] = {}
        self._news: list[ConstraintStatus] = []
        self._broken: list[RequestFailure] = []

    @property
    def compiling(self) -> bool:
        """Whether a constraint is still being compiled."""
        return any(entry.future is not None for entry in self._slots.values())

    def add(self, request: NewRequest) -> None:
        """A request enters its slot; its constraint, if it has one, starts to compile."""
        if getattr(request.params, "structured_outputs", None) is None:
            return
        try:
            provider = next((p for p in self._providers if p.validate(request.params)), None)
        except Exception as exc:  # noqa: BLE001 - whatever one constraint does ends that request only
            self._fail(request, _describe(exc))
            return
        if provider is None:
            names = ", ".join(type(p).__name__ for p in self._providers) or "none is configured"
            self._fail(request, f"no grammar provider serves this structured output ({names})")
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="trivet-grammar")
        outputs = request.token_ids[request.num_prompt :].tolist()
        future = self._pool.submit(_compile, provider, request.params, outputs)
        self._slots[request.slot] = _Constrained(request, provider, future)

    def remove(self, slot: int) -> None:
        """The request in ``slot`` left; compiling that has not begun is cancelled, the provider is told of one that is
        under way, a result that comes later is dropped."""
        entry = self._slots.pop(slot, None)
        if entry is not None and entry.future is not None and not entry.future.cancel() and not entry.future.done():
            assert entry.provider is not None
            entry.provider.cancel(entry.request.params)

    def poll(self, timeout: float = 0.0) -> None:
        """Take over what has been compiled, after waiting up to ``timeout`` seconds for the first of it."""
        if not self._slots:
            return
        open_entries = [entry for entry in self._slots.values() if entry.future is not None]
        if not open_entries:
            return
        if timeout > 0:
            wait([e.future for e in open_entries if e.future is not None], timeout, FIRST_COMPLETED)
        for entry in open_entries:
            if entry.future is not None and entry.future.done():
                self._settle(entry)

    def take_news(self) -> list[ConstraintStatus]:
        """Changes since the last call."""
        news, self._news = self._news, []
        return news

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take_news` would return anything."""
        return bool(self._news)

    def bitmask(self, rows: SampleRows) -> Int32 | None:
        """``[L, ceil(vocab / 32)]`` masks of allowed tokens for every logits row, None when no row is constrained.

        A draft that the grammar forbids leaves the rows behind it unmasked: verification never gets past it. The
        same holds for rows behind a draft that completes the output: :meth:`advance` cuts there."""
        if not self._slots:
            return None
        constrained = [(s, slot) for s, slot in enumerate(rows.slots.tolist()) if slot in self._slots]
        if not constrained:
            return None
        out = np.full((len(rows.positions), self._words), -1, np.int32)
        for s, slot in constrained:
            matcher = self._matcher(slot)
            if matcher is None:
                continue
            parents = None if rows.draft_parents is None else rows.draft_parents.row(s).tolist()
            masks = out[rows.starts[s] : rows.starts[s + 1]]
            try:
                _fill_row(matcher, masks, rows.drafts.row(s).tolist(), parents)
            except Exception as exc:  # noqa: BLE001 - whatever one constraint does ends that request only
                masks[:] = -1
                self._break(self._slots[slot], exc)
        return out

    def advance(self, rows: SampleRows, sampled: Sampled) -> Advanced:
        """Feed the accepted tokens to the matchers; tokens behind the end of a completed output are cut off.

        Matchers also take the tokens that they force, which the caller appends to the known tokens.
        """
        if not self._slots and not self._broken:
            return Advanced(sampled.accepted, sampled.logprobs, [])
        count = len(rows.slots)
        out = Advanced(sampled.accepted, sampled.logprobs, [np.empty(0, np.int32)] * count)
        keep = sampled.accepted.lengths.copy()
        for s, slot in enumerate(rows.slots.tolist()):
            entry = self._slots.get(slot)
            if entry is None or keep[s] == 0:
                continue
            if entry.matcher is None:
                keep[s] = 0
                continue
            try:
                keep[s], out.forced[s] = self._advance_row(entry, sampled.accepted.row(s).tolist(), out.errors)
            except Exception as exc:  # noqa: BLE001 - as above
                keep[s] = 0
                self._break(entry, exc)
        out.errors += self._broken
        self._broken = []
        if (keep < sampled.accepted.lengths).any():
            out.accepted = Ragged.from_rows([sampled.accepted.row(s)[: keep[s]] for s in range(count)])
            out.logprobs = _cut_logprobs(sampled.logprobs, keep)
        return out

    def shutdown(self) -> None:
        """Stop compiling."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._slots.clear()

    def _advance_row(self, entry: _Constrained, tokens: list[int], errors: list[RequestFailure]) -> tuple[int, Int32]:
        matcher, request = entry.matcher, entry.request
        assert matcher is not None
        none = np.empty(0, np.int32)
        for index, token in enumerate(tokens):
            if not matcher.accept(token):
                message = f"the grammar refuses token {token}, which its own mask allowed"
                errors.append(RequestFailure(request.slot, request.epoch, message))
                return index, none
            if matcher.is_terminated():
                self._terminated(request)
                return index + 1, none
        forced = list(matcher.forced())
        for index, token in enumerate(forced):
            if not matcher.accept(token):
                message = f"the grammar refuses token {token}, which it forces itself"
                errors.append(RequestFailure(request.slot, request.epoch, message))
                return len(tokens), none
            if matcher.is_terminated():
                self._terminated(request)
                return len(tokens), np.array(forced[: index + 1], np.int32)
        return len(tokens), np.array(forced, np.int32)

    def _break(self, entry: _Constrained, exc: Exception) -> None:
        """A matcher raised: its state is in doubt, and its request ends."""
        entry.matcher = None
        request = entry.request
        message = f"the grammar's matcher failed: {_describe(exc)}"
        self._broken.append(RequestFailure(request.slot, request.epoch, message))

    def _terminated(self, request: NewRequest) -> None:
        self._news.append(ConstraintStatus(request.slot, request.epoch, ConstraintState.TERMINATED))

    def _matcher(self, slot: int) -> Matcher | None:
        entry = self._slots[slot]
        if entry.future is not None:
            # The engine holds a request until its grammar is ready; one that it runs all the same waits here.
            wait([entry.future])
            self._settle(entry)
        return entry.matcher

    def _settle(self, entry: _Constrained) -> None:
        future, entry.future = entry.future, None
        assert future is not None
        request = entry.request
        exc = future.exception()
        if exc is not None:
            self._fail(request, _describe(exc))
            return
        entry.matcher, seconds = future.result()
        self._news.append(ConstraintStatus(request.slot, request.epoch, ConstraintState.READY, seconds=seconds))

    def _fail(self, request: NewRequest, message: str) -> None:
        self._slots[request.slot] = _Constrained(request)
        self._news.append(ConstraintStatus(request.slot, request.epoch, ConstraintState.FAILED, message))


def _compile(provider: Grammar, params: Any, output_ids: Sequence[int]) -> tuple[Matcher, float]:
    started = time.perf_counter()
    matcher = provider.compile(params, output_ids)
    return matcher, time.perf_counter() - started


def _describe(exc: BaseException) -> str:
    text = str(exc)
    return text if text and isinstance(exc, ValueError) else f"{type(exc).__name__}: {text}"


def _fill_row(matcher: Matcher, masks: Int32, drafts: list[int], parents: list[int] | None) -> None:
    """Masks of one sampling row: the position before the drafts, then each draft; the matcher ends where it began."""
    masks[0] = 0
    matcher.fill_bitmask(masks[0])
    path: list[int] = []  # drafts that the matcher has accepted, from the root
    dead = [False] * len(drafts)
    for node, token in enumerate(drafts):
        parent = node - 1 if parents is None else parents[node]
        if parent >= 0 and dead[parent]:
            dead[node] = True
            continue
        keep = path.index(parent) + 1 if parent >= 0 and parent in path else 0
        _walk_back(matcher, path, keep)
        if parent >= 0 and keep == 0:
            _walk_to(matcher, path, parent, drafts, parents)
        if not matcher.accept(token):
            dead[node] = True
            continue
        path.append(node)
        if matcher.is_terminated():
            dead[node] = True
        else:
            masks[1 + node] = 0
            matcher.fill_bitmask(masks[1 + node])
    _walk_back(matcher, path, 0)


def _walk_back(matcher: Matcher, path: list[int], keep: int) -> None:
    if len(path) > keep:
        matcher.rollback(len(path) - keep)
        del path[keep:]


def _walk_to(matcher: Matcher, path: list[int], node: int, drafts: list[int], parents: list[int] | None) -> None:
    ancestors = [node]
    while (parent := ancestors[-1] - 1 if parents is None else parents[ancestors[-1]]) >= 0:
        ancestors.append(parent)
    for ancestor in reversed(ancestors):
        accepted = matcher.accept(drafts[ancestor])
        assert accepted, "a matcher refused after a rollback what it accepted before"
        path.append(ancestor)


def _cut_logprobs(logprobs: list[RowLogprobs], keep: Int32) -> list[RowLogprobs]:
    from trivet.result import RowLogprobs

    cut: list[RowLogprobs] = []
    for entry in logprobs:
        n = int(keep[entry.row])
        values = entry.values
        if n:
            cut.append(
                RowLogprobs(entry.row, TokenLogprobs(values.token_ids[:n], values.logprobs[:n], values.ranks[:n]))
            )
    return cut
