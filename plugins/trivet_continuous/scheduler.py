"""Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024)."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.errors import OverloadedError
from trivet.plan import Bool, Int32, StepPlan
from trivet.policies import SchedulingPolicy, make_scheduling_policy, make_victim_policy
from trivet.roles import ScheduleInputs, Scheduler, SchedulerLimits, StepWaits, Wait
from trivet_continuous.pacing import PromptShare
from trivet_continuous.queue import WaitingQueue
from trivet_continuous.work import Work

if TYPE_CHECKING:
    from trivet.context import Context, EngineContext
    from trivet.state import Request
    from trivet_continuous.options import ContinuousOptions

_FIRST_RESERVE = 2  # tokens; doubles with every preemption of a request, so the first one asks for 4
_WINDOW_STEPS = 64  # full steps after which what was computed counts half
_NOBODY: frozenset[int] = frozenset()


class ContinuousScheduler(Scheduler):
    """Running requests first, then waiting ones, within a token budget.

    Rows that only decode get their tokens before prompts that are computed in chunks, so every running output
    advances in every step; options bound how many prompt tokens may slow such a step down. Memory goes by admission
    order, or by the policy's if that orders running requests: when a row lacks blocks, victims are taken among the
    rows after it (or the row itself), so the first one always gets on. Nothing is admitted in a step that preempted,
    and a request that was preempted asks for more room at each return, which bounds how often that can happen."""

    def __init__(self, context: Context, options: ContinuousOptions) -> None:
        self._options = options
        self._limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens)
        self._policy = make_scheduling_policy(context, options.policy)
        self._victim = make_victim_policy(context, options.victim)
        self._queue = WaitingQueue(self._policy)
        self._expiring: deque[tuple[float, Request]] = deque()
        self._stalled = ""  # why the head of the queue was not admitted in the last step
        self._unserved = _NOBODY  # running slots without tokens of the budget in the last step
        self._short = _NOBODY  # running slots that wait for blocks
        self._prompt_tokens = 0  # left for prompts in this step
        self._mixed = False  # whether rows decode in this step, which limits prompts
        self._work = Work(options.max_recomputed_share, _WINDOW_STEPS * options.max_num_batched_tokens)
        self._told: tuple[Request, str, Wait] | None = None

    @property
    def limits(self) -> SchedulerLimits:
        """See :attr:`Scheduler.limits`."""
        return self._limits

    def bind(self, context: EngineContext) -> None:
        """See :meth:`Scheduler.bind`."""
        options = self._options
        self._context, self._planner, self._table = context, context.planner, context.table
        self._cache = context.get("cache")
        self._policy.bind(context)
        self._victim.bind(context)
        self._work.bind(self._cache, context.table)
        #: only what a policy defines is called
        self._begins = type(self._policy).begin_step is not SchedulingPolicy.begin_step
        self._ranked: tuple[Int32, Int32] | None = None  # slots by admission, and by key
        self._chunk = options.long_prefill_token_threshold or options.max_num_batched_tokens
        self._pace: PromptShare | None = None
        if options.target_inter_token_latency is not None:
            lag = context.get("executor").max_in_flight - 1
            self._pace = PromptShare(options.target_inter_token_latency, options.min_num_mixed_prefill_tokens, lag)
        self._bounded = (
            self._chunk < options.max_num_batched_tokens
            or options.max_num_mixed_prefill_tokens is not None
            or self._pace is not None
        )

    # ------------------------------------------------------------------ the queue

    def add(self, request: Request) -> None:
        """See :meth:`Scheduler.add`."""
        options, waiting = self._options, len(self._queue)
        most = options.max_num_queued_reqs
        if most is not None and waiting >= most:
            raise OverloadedError(
                f"the queue is full: {_requests(waiting, 'wait')} (max_num_queued_reqs = {most}), "
                f"{self._table.num_running} run; try again later"
            )
        most, tokens = options.max_num_queued_tokens, self._queue.num_tokens
        if most is not None and waiting and tokens + request.num_prompt > most:
            raise OverloadedError(
                f"the queue is full: {_requests(waiting, 'wait')} with {tokens} prompt tokens, "
                f"{request.num_prompt} more would exceed max_num_queued_tokens = {most}; try again later"
            )
        self._policy.validate(request)
        self._queue.push(request)
        if options.max_queue_seconds is not None:
            self._expiring.append((time.monotonic() + options.max_queue_seconds, request))
            if len(self._expiring) > 2 * len(self._queue) + 64:
                self._expiring = deque(entry for entry in self._expiring if _never_ran(entry[1]))

    def requeue(self, request: Request) -> None:
        """See :meth:`Scheduler.requeue`."""
        self._queue.push(request)

    def remove(self, request: Request) -> None:
        """See :meth:`Scheduler.remove`."""
        self._queue.remove(request)

    def released(self, request: Request) -> None:
        """See :meth:`Scheduler.released`."""
        self._queue.unpark(request)

    @property
    def num_waiting(self) -> int:
        """See :attr:`Scheduler.num_waiting`."""
        return len(self._queue)

    def _expire(self) -> None:
        """End requests that waited for too long, those that came first first."""
        now, most = time.monotonic(), self._options.max_queue_seconds
        assert most is not None
        while self._expiring and self._expiring[0][0] <= now:
            due, request = self._expiring.popleft()
            if _never_ran(request):
                self._context.abort(
                    request.request_id,
                    f"waited {now - due + most:.1f} s for its turn, longer than max_queue_seconds = {most:g}; "
                    f"besides it, {_requests(len(self._queue) - 1, 'wait')} and {self._table.num_running} run",
                )

    # ------------------------------------------------------------------ a step

    def schedule(self, inputs: ScheduleInputs) -> StepPlan:
        """See :meth:`Scheduler.schedule`."""
        planner, pace = self._planner, self._pace
        if pace is not None:
            # What follows an idle time says nothing of a step.
            pace.tick(time.perf_counter(), idle=not self._table.num_running)
        if self._expiring:
            self._expire()
        if self._begins:
            self._policy.begin_step()
        inputs.token_budget = min(inputs.token_budget, self._limits.max_num_batched_tokens)
        planner.begin(inputs)
        self._short = self._unserved = _NOBODY
        self._stalled = ""
        self._queue.unpark_passing()
        if self._policy.preempts:
            self._displace(inputs)
        slots = self._ordered(planner.runnable())
        counts = self._share(slots, planner.pending(slots))
        given = counts > 0
        if np.count_nonzero(given) < len(slots):
            self._unserved = frozenset(slots[~given].tolist())
            slots, counts = slots[given], counts[given]
        self._extend(slots, counts)
        if planner.num_preempted:
            self._stalled = self._stalled or "memory"
        else:
            self._admit()
        plan = planner.finish()
        tokens = plan.num_tokens
        self._work.computed += tokens
        if pace is not None:
            pace.planned(tokens)
        return plan

    def _ordered(self, slots: Int32) -> Int32:
        """``slots`` in the order in which budget and memory go to them."""
        if len(slots) < 2:
            return slots
        if not self._policy.orders_running:
            return self._victim.order(slots, self._table)
        places = np.empty(self._table.max_num_seqs, np.int32)
        order = self._order()
        places[order] = np.arange(len(order))
        ordered: Int32 = slots[places[slots].argsort()]
        return ordered

    def _order(self) -> Int32:
        """Running slots in that order; a request's key does not change while it runs."""
        admitted = self._table.order
        if not self._policy.orders_running:
            return self._victim.order(admitted, self._table)
        if self._ranked is None or self._ranked[0] is not admitted:
            requests = self._table.requests
            keys = [self._policy.key(requests[slot]) for slot in admitted.tolist()]
            ranked = sorted(range(len(keys)), key=keys.__getitem__)
            self._ranked = admitted, admitted[ranked] if ranked else admitted
        return self._ranked[1]

    def _share(self, slots: Int32, pending: Int32) -> Int32:
        """Tokens per row: decoding rows first, then prompts in order, until the budget is used up."""
        budget = self._planner.tokens_left
        self._prompt_tokens, self._mixed = budget, False
        total = int(np.add.reduce(pending))
        if total <= budget and not self._bounded:
            return pending
        decoding = pending <= 1 + self._table.num_drafts[slots]
        wanted = pending
        if self._bounded:
            self._limit_prompts(pending, decoding)
            if total <= budget and bool(decoding.all()):
                return pending
            wanted = np.where(decoding, pending, np.minimum(pending, self._chunk))
        counts = np.zeros_like(pending)
        for rows, most in ((np.flatnonzero(decoding), budget), (np.flatnonzero(~decoding), self._prompt_tokens)):
            asked = wanted[rows]
            counts[rows] = given = np.clip(min(most, budget) - (np.cumsum(asked) - asked), 0, asked)
            used = int(np.add.reduce(given))
            budget -= used
        self._prompt_tokens -= used
        return counts

    def _limit_prompts(self, pending: Int32, decoding: Bool) -> None:
        """How many prompt tokens this step may have, running and new requests together."""
        tokens = int(np.add.reduce(pending[decoding]))
        if not tokens:
            return
        self._mixed = True
        most = self._options.max_num_mixed_prefill_tokens
        if most is not None:
            self._prompt_tokens = min(self._prompt_tokens, most)
        if self._pace is not None:
            self._prompt_tokens = min(self._prompt_tokens, self._pace.limit(tokens))

    def _extend(self, slots: Int32, counts: Int32) -> None:
        planner = self._planner
        while len(slots):
            done = planner.extend(slots, counts)
            slots, counts = slots[done:], counts[done:]
            if not len(slots):
                break
            if planner.memory_pending:
                self._short = frozenset(slots.tolist())
                break
            # Only rows from the first unserved one on may lose their blocks.
            order = self._order()
            rest = order[int(np.flatnonzero(order == slots[0])[0]) :]
            victim = self._victim.choose(rest[~planner.planned(rest)], self._table)
            planner.preempt(victim)
            self._unserved -= {victim}
            keep = slots != victim
            slots, counts = slots[keep], counts[keep]

    def _admit(self) -> None:
        planner, queue = self._planner, self._queue
        while (request := queue.head()) is not None:
            tokens = planner.tokens_left
            if self._bounded:
                tokens = min(tokens, self._prompt_tokens, self._chunk)
            if tokens < 1:
                self._stalled = "compute"
                break
            if self._work.is_wasted and not self._work.has_room(request):
                self._stalled = "memory"
                break
            again = request.num_recomputed_tokens
            admission = planner.admit(request, tokens, reserve=_reserve(request))
            if admission.ok:
                self._work.admitted(request.num_recomputed_tokens - again)
                queue.pop(request)
                self._prompt_tokens -= admission.num_tokens
            elif admission.reason == "hold":
                queue.park(request, passing=not request.holds)
            else:
                self._stalled = admission.reason
                break

    def _displace(self, inputs: ScheduleInputs) -> None:
        """Admit waiting requests that are more urgent than running ones, in place of the least urgent if need be."""
        planner, queue, table = self._planner, self._queue, self._table
        chosen: Request | None = None  # for whom others had to go, perhaps all that were less urgent
        while (request := queue.head()) is not None:
            key, later = self._policy.key(request), list[int]()
            for slot in reversed(self._order().tolist()):
                if not self._policy.key(table.requests[slot]) > key:
                    break
                later.append(slot)
            if not later and request is not chosen:
                break
            # Its tokens are shared out below, with everybody else's.
            again = request.num_recomputed_tokens
            admission = planner.admit(request, 0, reserve=_reserve(request))
            if admission.ok:
                self._work.admitted(request.num_recomputed_tokens - again)
                queue.pop(request)
            elif admission.reason == "hold":
                queue.park(request, passing=not request.holds)
            elif (
                not later
                or planner.memory_pending
                or not self._makes_room(request, later, admission.reason, inputs.max_num_seqs)
            ):
                self._stalled = admission.reason
                break
            else:
                chosen = request
                planner.preempt(later[0])

    def _makes_room(self, request: Request, later: list[int], reason: str, most: int) -> bool:
        """Whether a request could run if all of these were preempted, as far as that can be told."""
        if reason != "memory":
            # Where the limit was lowered, many would have to go to let one in.
            return self._table.num_running <= min(most, self._limits.max_num_seqs)
        needed = self._cache.request_blocks(min(request.num_known + _reserve(request), request.max_total))
        if needed is None:
            return True
        held = sum(int(np.count_nonzero(table)) for slot in later for table in self._cache.tables(slot))
        return bool(needed <= self._cache.stats().free + held)

    # ------------------------------------------------------------------ reasons

    def waits(self) -> StepWaits:
        """See :meth:`Scheduler.waits`."""
        head = self._queue.head() if self._stalled else None
        return StepWaits(None if head is None else self._tell_head(head), self._unserved, self._short)

    def _tell_head(self, head: Request) -> Wait:
        """Why the next request was not admitted; counting blocks takes too long to do it in every step."""
        if self._told is None or self._told[:2] != (head, self._stalled):
            wait = self._explain_head(self._stalled)
            if wait.kind == "memory":
                known = head.num_known
                wait = Wait("memory", f"too few blocks are free for its {known} known tokens", {"tokens": known})
            self._told = head, self._stalled, wait
        return self._told[2]

    def explain(self, request: Request) -> Wait | None:
        """See :meth:`Scheduler.explain`."""
        if request.slot >= 0:
            if request.slot in self._unserved:
                return self._explain_budget("others")
            return self._explain_memory() if request.slot in self._short else None
        head = self._queue.head()
        if head is None or head is request:
            return self._explain_head(self._stalled or "turn")
        ahead = self._queue.ahead(request)
        return Wait("turn", f"{ahead} waiting requests are ahead of it", {"ahead": ahead})

    def check_integrity(self) -> None:
        """See :meth:`Role.check_integrity`."""
        self._queue.check_integrity()

    def _explain_memory(self) -> Wait:
        stats = self._cache.stats()
        detail = f"{stats.free} of {stats.total} blocks are free, too few for its known tokens"
        numbers: dict[str, Any] = {"free": stats.free, "total": stats.total}
        if self._work.is_wasted:
            numbers["recomputed_share"] = share = round(self._work.share, 3)
            detail = (
                f"{stats.free} of {stats.total} blocks are free, and {share:.0%} of all tokens were computed again "
                "after preemptions: until it is less, requests need room for all that they and the others may become"
            )
        return Wait("memory", detail, numbers)

    def _explain_budget(self, others: str) -> Wait:
        budget = self._limits.max_num_batched_tokens
        detail = f"the step's token budget of {budget} went to {others}"
        if self._mixed:
            detail += "; prompts have a share of it while others generate"
        return Wait("compute", detail, {"token_budget": budget})

    def _explain_head(self, reason: str) -> Wait:
        if reason == "memory":
            return self._explain_memory()
        if reason == "compute":
            return self._explain_budget("running requests")
        running, most = self._table.num_running, self._limits.max_num_seqs
        detail = f"{_requests(running, 'run')}, max_num_seqs is {most}"
        return Wait("turn", detail, {"running": running, "max_num_seqs": most})


def _reserve(request: Request) -> int:
    """Tokens beyond the known ones that a request must have room for at its return."""
    return _FIRST_RESERVE << min(request.num_preemptions, 20) if request.num_preemptions else 0


def _requests(count: int, verb: str) -> str:
    return f"1 request {verb}s" if count == 1 else f"{count} requests {verb}"


def _never_ran(request: Request) -> bool:
    return request.first_scheduled_time is None and request.finish_reason is None
