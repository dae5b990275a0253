"""Requests, and the slots and columns of those that run.

A request that runs occupies a *slot*, a row of numpy columns, from its admission to its end or preemption. Schedule
and commit work on columns for all rows at once; Python objects are touched only for rows that change. The same slot
number is used by the workers, and ``(slot, epoch)`` names one admission of one request: an epoch is never used
twice, so a result for an earlier admission is recognised and dropped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from trivet.context import Hold
from trivet.plan import Bool, Int32, Int64, Ragged, Task

_STOP_IDS = 8  # columns of stop ids; a request may have more


class Status(IntEnum):
    """Where a request stands."""

    WAITING = 0
    HELD = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


@dataclass(frozen=True, slots=True)
class PromptRange:
    """Positions ``[start, start + length)`` of a prompt that take embeddings of ``item`` instead of their tokens': an
    image's, or the caller's own. Their token ids are placeholders, so a prefix hash takes ``digest`` and the place in
    the item in their stead."""

    start: int
    length: int
    item: str
    digest: bytes
    offset: int = 0  #: first embedding row of the item to use


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One request; times are monotonic seconds."""

    request_id: str
    prompt_ids: Int32  #: [num_prompt]
    params: Any  #: SamplingParams or PoolingParams
    max_total: int  #: prompt + outputs at most
    seed: int
    index: int = 0  #: arrival order, never reused
    task: int = Task.GENERATE
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    prompt: str | None = None
    adapter: str | None = None
    #: every prompt token is to be computed, as the request pools over all of them: none may come from a cache
    whole_prompt: bool = False
    #: context of the prefix hash, by tag: adapter, cache_salt, image digests, whatever a plugin adds
    cache_tags: Mapping[str, bytes] = field(default_factory=dict)
    ranges: tuple[PromptRange, ...] = ()
    parent: str | None = None  #: the request whose prompt this one shares (n > 1)
    bad_words: Ragged | None = None  #: token sequences that the output must not contain, one per row
    extra: dict[str, bytes] = field(default_factory=dict)

    slot: int = -1
    epoch: int = -1
    holds: dict[tuple[str, str], Hold] = field(default_factory=dict)  #: by (plugin, kind)
    #: committed outputs while the request is not in a slot
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = -1  #: found in the prefix cache at the first admission; -1: not admitted yet
    num_recomputed_tokens: int = 0  #: computed again after preemptions; what was found in the cache does not count
    num_lost_tokens: int = 0  #: computed when the last preemption took the blocks, until the next admission

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.prompt_ids)

    @property
    def num_known(self) -> int:
        """Prompt and committed outputs; only meaningful while the request is not in a slot."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def status(self) -> Status:
        """Derived, so it cannot contradict the rest."""
        if self.finish_reason is not None:
            return Status.FINISHED
        if self.holds:
            return Status.HELD
        if self.slot >= 0:
            return Status.RUNNING
        return Status.PREEMPTED if self.num_preemptions else Status.WAITING


class RequestTable:
    """Columns of running requests, ``[max_num_seqs]`` each.

    ``num_known`` prompt and committed outputs; ``num_placeholders`` tokens that steps in flight will draw;
    ``num_computed`` tokens whose KV is computed or being computed by a step in flight; ``num_committed`` tokens
    whose KV is final; ``num_drafts`` drafts to verify next."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        n = max_num_seqs
        self.max_num_seqs, self.max_model_len = n, max_model_len
        self.requests: list[Request | None] = [None] * n
        self.epoch: Int64 = np.full(n, -1, np.int64)
        self.num_prompt: Int32 = np.zeros(n, np.int32)
        self.num_known: Int32 = np.zeros(n, np.int32)
        self.num_placeholders: Int32 = np.zeros(n, np.int32)
        self.num_computed: Int32 = np.zeros(n, np.int32)
        self.num_committed: Int32 = np.zeros(n, np.int32)
        self.num_sent: Int32 = np.zeros(n, np.int32)
        self.num_drafts: Int32 = np.zeros(n, np.int32)
        self.max_total: Int32 = np.zeros(n, np.int32)
        self.min_total: Int32 = np.zeros(n, np.int32)  #: stop tokens count from this many known tokens on
        self.in_flight: Int32 = np.zeros(n, np.int32)
        self.draft_k: Int32 = np.zeros(n, np.int32)
        #: how many tokens a step adds is open until it is committed (drafts are verified, a grammar forces tokens)
        self.serial: Bool = np.zeros(n, np.bool_)
        self.adapter: Int32 = np.full(n, -1, np.int32)
        self.held: Bool = np.zeros(n, np.bool_)
        self.pooled: Bool = np.zeros(n, np.bool_)
        self.ranged: Bool = np.zeros(n, np.bool_)
        self.prompt_logprobs: Bool = np.zeros(n, np.bool_)
        #: every prompt token is to be computed, for its logprobs or its hidden state: none is taken from a cache
        self.whole_prompt: Bool = np.zeros(n, np.bool_)
        #: untouched pages of this matrix cost no memory
        self.tokens: Int32 = np.zeros((n, max_model_len), np.int32)
        #: column by column in memory, as they are read
        self.stop_ids: Int32 = np.full((n, _STOP_IDS), -1, np.int32, order="F")
        self._stop_width = 0  # columns that were ever used
        #: slot → all of its stop ids, where there are more than the columns hold
        self.many_stop_ids: dict[int, Int32] = {}
        self.drafts: dict[int, tuple[Int32, Int32 | None]] = {}  #: slot → (ids, parents)
        self._free = list(range(n - 1, -1, -1))
        self._running: dict[int, None] = {}  # slots in admission order
        self._order: Int32 | None = None
        self._next_epoch = 0

    @property
    def num_running(self) -> int:
        """Occupied slots."""
        return len(self._running)

    @property
    def order(self) -> Int32:
        """``[num_running]`` slots in admission order."""
        if self._order is None:
            self._order = np.fromiter(self._running, np.int32, len(self._running))
        return self._order

    def assign(self, request: Request, stop_ids: tuple[int, ...], draft_k: int) -> int:
        """Put a request into a free slot under a new epoch; IndexError when there is none."""
        slot = self._free.pop()
        self._next_epoch += 1
        request.slot, request.epoch = slot, self._next_epoch
        params, prompt = request.params, request.num_prompt
        known = request.num_known
        self.requests[slot] = request
        self.epoch[slot] = request.epoch
        self.num_prompt[slot], self.num_known[slot] = prompt, known
        for column in (
            self.num_placeholders,
            self.num_computed,
            self.num_committed,
            self.num_sent,
            self.num_drafts,
            self.in_flight,
        ):
            column[slot] = 0
        self.max_total[slot] = request.max_total
        self.min_total[slot] = prompt + (getattr(params, "min_tokens", 0) or 0)
        self.draft_k[slot] = draft_k
        self.serial[slot] = draft_k > 0 or getattr(params, "structured_outputs", None) is not None
        self.adapter[slot] = -1
        self.held[slot] = bool(request.holds)
        self.pooled[slot] = request.task != Task.GENERATE
        self.ranged[slot] = bool(request.ranges)
        self.prompt_logprobs[slot] = getattr(params, "prompt_logprobs", None) is not None
        self.whole_prompt[slot] = request.whole_prompt or self.prompt_logprobs[slot]
        self.tokens[slot, :prompt] = request.prompt_ids
        if request.output_ids:
            self.tokens[slot, prompt:known] = request.output_ids
        self.stop_ids[slot] = -1
        if len(stop_ids) <= _STOP_IDS:
            self.stop_ids[slot, : len(stop_ids)] = stop_ids
            self._stop_width = max(self._stop_width, len(stop_ids))
        else:
            # Wider columns would slow every step down, for as long as the engine runs.
            self.many_stop_ids[slot] = np.array(stop_ids, np.int32)
        self._running[slot] = None
        self._order = None
        return slot

    def release(self, slot: int) -> Request:
        """Take the request out of its slot, its outputs with it."""
        outputs = self.tokens[slot, self.num_prompt[slot] : self.num_known[slot]].tolist()
        request = self.unassign(slot)
        request.output_ids = outputs
        return request

    def unassign(self, slot: int) -> Request:
        """Take a request out of its slot to which nothing has happened there."""
        request = self.requests[slot]
        if request is None:
            raise KeyError(f"slot {slot} is empty")
        request.slot = -1
        self.requests[slot] = None
        self.epoch[slot] = -1
        self.held[slot] = self.pooled[slot] = self.ranged[slot] = False
        self.prompt_logprobs[slot] = self.whole_prompt[slot] = False
        self.drafts.pop(slot, None)
        self.many_stop_ids.pop(slot, None)
        del self._running[slot]
        self._free.append(slot)
        self._order = None
        return request

    def stops(self, slots: Int32 | Int64, tokens: Int32) -> Bool:
        """``[n]`` whether ``tokens[i]`` is a stop id of ``slots[i]``."""
        found: Bool = np.zeros(len(tokens), np.bool_)
        for column in range(self._stop_width):
            found |= self.stop_ids[:, column][slots] == tokens
        for slot, ids in self.many_stop_ids.items():
            own = slots == slot
            found[own] = np.isin(tokens[own], ids)
        return found

    def all_stop_ids(self, slot: int) -> Int32:
        """``[n]`` the stop ids of a slot."""
        few: Int32 = self.stop_ids[slot]
        many = self.many_stop_ids.get(slot)
        return few[few >= 0] if many is None else many

    def num_output(self, request: Request) -> int:
        """Committed outputs of a request, in a slot or not."""
        if request.slot >= 0:
            return int(self.num_known[request.slot] - self.num_prompt[request.slot])
        return len(request.output_ids)

    def known_tokens(self, request: Request) -> Int32:
        """``[num_known]`` tokens of a request, in a slot or not."""
        if request.slot >= 0:
            return self.tokens[request.slot, : self.num_known[request.slot]]
        return np.concatenate([request.prompt_ids, np.asarray(request.output_ids, np.int32)])

    def check_integrity(self) -> None:
        """Columns of every occupied slot agree with each other and with the request."""
        assert len(self._free) + len(self._running) == self.max_num_seqs, "slots are lost"
        for slot in self._running:
            request = self.requests[slot]
            assert request is not None, f"slot {slot} is listed as running but empty"
            assert (request.slot, request.epoch) == (slot, self.epoch[slot]), request.request_id
            known, computed = int(self.num_known[slot]), int(self.num_computed[slot])
            ahead = known + int(self.num_placeholders[slot]) + int(self.num_drafts[slot])
            assert self.num_prompt[slot] <= known <= self.max_total[slot], request.request_id
            assert 0 <= self.num_committed[slot] <= computed <= ahead, request.request_id
            assert self.num_sent[slot] <= known, request.request_id
            assert self.in_flight[slot] >= 0, request.request_id
