"""Plans written by hand: a tiny engine that knows each request's tokens and says in every step what to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trivet.plan import BlockDelta, InputSource, LogitsRows, NewRequest, Ragged, StepPlan, Task
from trivet.result import StepResult
from trivet.roles import AttentionSupport, KVGroup, KVLayout, KVStorage, LayerKVSpec


@dataclass(slots=True)
class Script:
    """A request as the tiny engine knows it."""

    request_id: str
    slot: int
    epoch: int
    tokens: list[int]
    num_prompt: int
    params: Any
    task: Task
    resumed: bool
    seed: int
    blocks: list[list[int]]
    computed: int = 0
    sent: int = 0
    drawn: int = 0  #: tokens that steps in flight draw


@dataclass(slots=True)
class Drafted:
    """Drafts of a row; ``parents`` None: a chain."""

    tokens: list[int]
    parents: list[int] | None = None


def make_layout(
    specs: Sequence[LayerKVSpec], support: Sequence[AttentionSupport], block_size: int, num_blocks: int
) -> KVLayout:
    """A group per kind and window of layer, each layer with a buffer of its own; a block size that attention can do."""
    multiple = max(one.block_size_multiple for one in support)
    size = -(-block_size // multiple) * multiple
    kinds = sorted({(s.kind, s.window or 0) for s in specs})
    groups = []
    for index, (kind, window) in enumerate(kinds):
        layers = tuple(s.layer for s in specs if (s.kind, s.window or 0) == (kind, window))
        groups.append(KVGroup(index, layers, kind, size, window or None))
    return KVLayout(tuple(specs), tuple(groups), tuple(KVStorage((s.layer,), num_blocks) for s in specs))


@dataclass(slots=True)
class PlanWriter:
    """Keeps requests and blocks, and writes plans that advance them."""

    layout: KVLayout
    num_blocks: int
    rng: Any
    requests: dict[int, Script] = field(default_factory=dict)
    step_id: int = 0
    _free: list[list[int]] = field(default_factory=list)
    _new: list[Script] = field(default_factory=list)
    _gone: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"preempted": [], "finished": []})
    _epoch: int = 0

    def __post_init__(self) -> None:
        order = range(1, self.num_blocks)
        self._free = [[int(b) for b in self.rng.permutation(order)] for _ in self.layout.groups]

    # ------------------------------------------------------------------ requests

    def add(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        num_prompt: int | None = None,
        params: Any = None,
        task: Task = Task.GENERATE,
        seed: int = 0,
        request_id: str = "",
    ) -> Script:
        """Admit a request with the next plan; ``tokens`` beyond ``num_prompt`` were its outputs before a preemption."""
        self._epoch += 1
        prompt = len(tokens) if num_prompt is None else num_prompt
        script = Script(
            request_id or f"r{self._epoch}",
            slot,
            self._epoch,
            list(tokens),
            prompt,
            params,
            task,
            prompt < len(tokens),
            seed,
            [[] for _ in self.layout.groups],
        )
        self.requests[slot] = script
        self._new.append(script)
        return script

    def drop(self, slot: int, *, preempt: bool = False) -> Script:
        """A request leaves its slot with the next plan; its blocks are given to others."""
        script = self.requests.pop(slot)
        self._gone["preempted" if preempt else "finished"].append((slot, script.epoch))
        for free, blocks in zip(self._free, script.blocks, strict=True):
            free.extend(blocks)
        return script

    def pending(self, slot: int) -> int:
        """Tokens that a request still has to compute."""
        script = self.requests[slot]
        return len(script.tokens) + script.drawn - script.computed

    # ------------------------------------------------------------------ plans

    def plan(
        self,
        counts: Mapping[int, int] | None = None,
        *,
        drafts: Mapping[int, Drafted] | None = None,
        prompt_logprobs: bool = False,
    ) -> StepPlan:
        """The plan that computes ``counts[slot]`` tokens (None: all that is pending of every request).

        A row with drafts computes all that is pending, and the drafts."""
        drafts = drafts or {}
        chosen = {slot: self.pending(slot) for slot in self.requests} if counts is None else dict(counts)
        slots = [slot for slot in chosen if chosen[slot] > 0]
        self.step_id += 1
        plan = StepPlan(self.step_id)
        for kind, gone in self._gone.items():
            setattr(plan, kind, np.array([s for s, _ in gone], np.int32))
            setattr(plan, f"{kind}_epochs", np.array([e for _, e in gone], np.int64))
            gone.clear()
        rows = [self.requests[slot] for slot in slots]
        new = {script.slot for script in self._new}
        added: list[list[tuple[int, list[int]]]] = [[] for _ in self.layout.groups]
        for script in rows:
            extra = len(drafts[script.slot].tokens) if script.slot in drafts else 0
            for group, blocks in enumerate(self._grow(script, script.computed + chosen[script.slot] + extra)):
                if blocks and script.slot not in new:
                    added[group].append((script.slot, blocks))
        plan.new = [self._new_request(script) for script in self._new]
        plan.resumed = np.array([s.slot for s in self._new if s.resumed], np.int32)
        for script in self._new:
            script.sent = len(script.tokens)
        self._new.clear()
        plan.new_blocks = [
            BlockDelta(np.array([s for s, _ in g], np.int32), Ragged.from_rows([b for _, b in g])) for g in added
        ]
        plan.copies = [np.empty((0, 2), np.int32) for _ in self.layout.groups]
        plan.zeroing = [np.empty(0, np.int32) for _ in self.layout.groups]
        self._fill(plan, rows, [chosen[s] for s in slots], [drafts.get(s) for s in slots], prompt_logprobs)
        return plan

    def _fill(
        self,
        plan: StepPlan,
        rows: list[Script],
        counts: list[int],
        drafts: list[Drafted | None],
        prompt_logprobs: bool,
    ) -> None:
        num_drafts = [len(d.tokens) if d else 0 for d in drafts]
        known = [len(r.tokens) + r.drawn for r in rows]
        complete = [r.computed + n >= k for r, n, k in zip(rows, counts, known, strict=True)]
        pooled = [r.task != Task.GENERATE for r in rows]
        plan.slots = np.array([r.slot for r in rows], np.int32)
        plan.epochs = np.array([r.epoch for r in rows], np.int64)
        plan.num_computed = np.array([r.computed for r in rows], np.int32)
        plan.num_scheduled = np.array([n + d for n, d in zip(counts, num_drafts, strict=True)], np.int32)
        plan.num_drafts = np.array(num_drafts, np.int32)
        plan.lookahead = np.zeros(len(rows), np.int32)
        plan.samples = np.array([c and not p for c, p in zip(complete, pooled, strict=True)], np.bool_)
        plan.pools = np.array([c and p for c, p in zip(complete, pooled, strict=True)], np.bool_)
        plan.input_source = np.array(
            [InputSource.DEVICE if r.drawn and c else InputSource.KNOWN for r, c in zip(rows, complete, strict=True)],
            np.uint8,
        )
        logits = []
        for row, sampling, number in zip(rows, plan.samples.tolist(), num_drafts, strict=True):
            kind = LogitsRows.NONE
            if prompt_logprobs and row.computed < row.num_prompt - 1:
                kind = LogitsRows.PROMPT
            elif sampling:
                kind = LogitsRows.DRAFTS if number else LogitsRows.LAST
            logits.append(kind)
        plan.logits_rows = np.array(logits, np.uint8)
        plan.tokens = Ragged.from_rows([r.tokens[r.sent :] for r in rows])
        plan.draft_k = np.zeros(len(rows), np.int32)
        plan.adapter = np.full(len(rows), -1, np.int32)
        if any(num_drafts):
            plan.draft_ids = Ragged.from_rows([d.tokens if d else [] for d in drafts])
            if any(d is not None and d.parents is not None for d in drafts):
                chains = [d.parents or list(range(-1, len(d.tokens) - 1)) if d else [] for d in drafts]
                plan.draft_parents = Ragged.from_rows(chains)
        for row, count, sampling in zip(rows, counts, plan.samples.tolist(), strict=True):
            row.computed += count
            row.sent = len(row.tokens)
            row.drawn += sampling

    def take(self, plan: StepPlan, result: StepResult) -> dict[int, list[int]]:
        """Take a result over; the accepted tokens by slot. Accepted drafts count as computed."""
        accepted: dict[int, list[int]] = {}
        for row, (slot, epoch) in enumerate(zip(plan.slots.tolist(), plan.epochs.tolist(), strict=True)):
            script = self.requests.get(slot)
            if script is None or script.epoch != epoch or not plan.samples[row]:
                continue
            tokens = result.accepted.row(row).tolist()
            accepted[slot] = tokens
            script.drawn -= 1
            script.tokens += tokens
            script.computed += max(len(tokens) - 1, 0)
        return accepted

    def _grow(self, script: Script, total: int) -> list[list[int]]:
        added: list[list[int]] = []
        for free, blocks, group in zip(self._free, script.blocks, self.layout.groups, strict=True):
            missing = -(-total // group.block_size) - len(blocks)
            taken = [free.pop() for _ in range(missing)]
            blocks.extend(taken)
            added.append(taken)
        return added

    @staticmethod
    def _new_request(script: Script) -> NewRequest:
        return NewRequest(
            request_id=script.request_id,
            slot=script.slot,
            epoch=script.epoch,
            token_ids=np.array(script.tokens, np.int32),
            num_prompt=script.num_prompt,
            num_computed=0,
            blocks=[np.array(blocks, np.int32) for blocks in script.blocks],
            params=script.params,
            task=script.task,
            seed=script.seed,
            resumed=script.resumed,
        )
