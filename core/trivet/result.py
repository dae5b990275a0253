"""The step result: what the workers report for one plan, and how the results of several ranks become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from trivet.plan import EMPTY_I32, EMPTY_I64, Float32, Int32, Int64, Ragged

Reducer = Callable[[Sequence[bytes]], bytes]


class ConstraintState(IntEnum):
    """What became of a request's grammar in the worker."""

    READY = 0  #: compiled; the request may be scheduled
    FAILED = 1  #: invalid or unsupported; ``message`` goes to the user
    TERMINATED = 2  #: the output is complete and nothing may follow


@dataclass(slots=True)
class ConstraintStatus:
    """A change of a request's grammar state."""

    slot: int
    epoch: int
    state: int
    message: str = ""
    seconds: float = 0.0  #: how long compiling took; 0 unless it is ``READY``


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities (float32, of the raw model) for consecutive accepted tokens.

    ``token_ids`` and ``logprobs`` are ``[n, 1 + k]``: the drawn token first, then the ``k`` most likely;
    ``ranks`` ``[n]`` is the drawn token's rank, 1 = most likely.
    """

    token_ids: Int32
    logprobs: Float32
    ranks: Int32


@dataclass(slots=True)
class RowLogprobs:
    """Logprobs of a row's accepted tokens in this step."""

    row: int
    values: TokenLogprobs


@dataclass(slots=True)
class PromptLogprobs:
    """A chunk of prompt logprobs: ``values[i]`` is about the prompt token at position ``start + i`` (``start`` ≥ 1)."""

    slot: int
    epoch: int
    start: int
    values: TokenLogprobs


@dataclass(slots=True)
class Pooled:
    """The pooled output of a row: ``[dim]`` float32."""

    slot: int
    epoch: int
    data: Float32


@dataclass(slots=True)
class RequestFailure:
    """One request's error in this step; the engine ends that request with ``message``."""

    slot: int
    epoch: int
    message: str


@dataclass(slots=True)
class StepResult:
    """What one plan produced. Rows are the plan's rows; ``slots`` and ``epochs`` repeat its keys."""

    step_id: int
    slots: Int32 = field(default_factory=lambda: EMPTY_I32)
    epochs: Int64 = field(default_factory=lambda: EMPTY_I64)
    #: accepted tokens per row (none for rows that do not sample; 1 + accepted drafts otherwise)
    accepted: Ragged = field(default_factory=Ragged.empty)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    #: proposals for the next step, per row; None: no drafter, or the worker keeps them to itself
    next_drafts: Ragged | None = None
    #: parents within the row, -1 = the last accepted token; None: chains
    next_draft_parents: Ragged | None = None
    #: number of proposals that the worker keeps, per row; None: see ``next_drafts``
    num_next_drafts: Int32 | None = None
    #: tokens that a grammar forces next, per row: known without sampling, still to be computed
    forced: Ragged | None = None
    constraints: list[ConstraintStatus] = field(default_factory=list)
    #: ids of transfers that ended well / that failed
    transfers_finished: Int64 = field(default_factory=lambda: EMPTY_I64)
    transfers_failed: Int64 = field(default_factory=lambda: EMPTY_I64)
    #: per KV group: blocks whose content must not be used (a load failed half-way)
    invalid_blocks: list[Int32] = field(default_factory=list)
    errors: list[RequestFailure] = field(default_factory=list)
    #: True: a plugin raised RequestFault, nothing of this step counts, the rows without an error are to be run again
    undone: bool = False
    #: seconds by phase name
    timings: dict[str, float] = field(default_factory=dict)
    extensions: dict[str, bytes] = field(default_factory=dict)


def first(values: Sequence[bytes]) -> bytes:
    """The default reducer of an extension: rank 0 speaks for all."""
    return values[0]


def reduce_results(results: Sequence[StepResult], reducers: Mapping[str, Reducer] | None = None) -> StepResult:
    """Merge the ranks' results of one plan, rank 0 first.

    Tokens, logprobs, pooled outputs and drafts are taken from the first rank that has them (the last pipeline stage, or
    rank 0 of a tensor-parallel group). A transfer has finished when it finished on every rank and failed when it
    failed on any, so a rank that reports earlier must be merged with the later ones by the executor
    (:class:`TransferQuorum`). Invalid blocks and errors are united; timings are the slowest rank's.
    """
    if not results:
        raise ValueError("no results to reduce")
    if len(results) == 1:
        return results[0]
    ids = {r.step_id for r in results}
    if len(ids) != 1:
        raise ValueError(f"results of different steps cannot be reduced: {sorted(ids)}")
    base = next((r for r in results if r.accepted.values.size or r.pooled), results[0])
    out = StepResult(
        step_id=base.step_id,
        slots=base.slots,
        epochs=base.epochs,
        accepted=base.accepted,
        logprobs=base.logprobs,
        prompt_logprobs=next((r.prompt_logprobs for r in results if r.prompt_logprobs), []),
        pooled=base.pooled,
        next_drafts=next((r.next_drafts for r in results if r.next_drafts is not None), None),
        next_draft_parents=next((r.next_draft_parents for r in results if r.next_draft_parents is not None), None),
        num_next_drafts=next((r.num_next_drafts for r in results if r.num_next_drafts is not None), None),
        forced=next((r.forced for r in results if r.forced is not None), None),
        undone=any(r.undone for r in results),
    )
    status: dict[tuple[int, int], ConstraintStatus] = {}
    failures: dict[tuple[int, int], RequestFailure] = {}
    for result in results:
        for c in result.constraints:
            known = status.get((c.slot, c.epoch))
            if known is None or c.state == ConstraintState.FAILED:
                status[c.slot, c.epoch] = c
        for e in result.errors:
            failures.setdefault((e.slot, e.epoch), e)
        for phase, seconds in result.timings.items():
            out.timings[phase] = max(seconds, out.timings.get(phase, 0.0))
    out.constraints, out.errors = list(status.values()), list(failures.values())
    failed = np.unique(np.concatenate([r.transfers_failed for r in results]))
    finished = results[0].transfers_finished
    for result in results[1:]:
        finished = np.intersect1d(finished, result.transfers_finished)
    out.transfers_failed = failed.astype(np.int64)
    out.transfers_finished = np.setdiff1d(finished, failed).astype(np.int64)
    groups = max(len(r.invalid_blocks) for r in results)
    for g in range(groups):
        parts = [r.invalid_blocks[g] for r in results if len(r.invalid_blocks) > g]
        out.invalid_blocks.append(np.unique(np.concatenate(parts)).astype(np.int32))
    for key in sorted({k for r in results for k in r.extensions}):
        reducer = (reducers or {}).get(key, first)
        out.extensions[key] = reducer([r.extensions[key] for r in results if key in r.extensions])
    return out


class TransferQuorum:
    """Hold back the end of a transfer until every rank has reported it, whatever the order of the reports.

    Executors with several ranks pass each rank's results through :meth:`settle` before reducing them: a rank's
    early report is kept and shown once the last rank's arrives, so the intersection in :func:`reduce_results` never
    loses one."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ended: dict[int, set[int]] = {}
        self._failed: set[int] = set()

    def settle(self, results: Sequence[StepResult]) -> None:
        """Rewrite the transfer fields of ``results`` (one per rank) in place."""
        for rank, result in enumerate(results):
            for tid in result.transfers_failed.tolist():
                self._failed.add(tid)
                self._ended.setdefault(tid, set()).add(rank)
            for tid in result.transfers_finished.tolist():
                self._ended.setdefault(tid, set()).add(rank)
        complete = [tid for tid, ranks in self._ended.items() if len(ranks) == self._ranks]
        finished = np.array([t for t in complete if t not in self._failed], np.int64)
        failed = np.array([t for t in complete if t in self._failed], np.int64)
        for tid in complete:
            del self._ended[tid]
            self._failed.discard(tid)
        for result in results:
            result.transfers_finished, result.transfers_failed = finished, failed
