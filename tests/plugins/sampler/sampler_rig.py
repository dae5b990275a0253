"""A bound sampler with requests in slots, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trivet.plan import NewRequest, Ragged
from trivet.roles import LogitsProcessor, Sampled, SampleRows
from trivet_sampler.sampler import TorchSampler
from trivet_schemas.sampling import SamplingParams

VOCAB, KNOWN = 330, 300  #: the model has more rows than the tokenizer has ids


@dataclass
class Row:
    """A sampling row: its slot, where its output stands, and drafts to verify."""

    slot: int
    position: int = 0
    drafts: Sequence[int] = ()
    parents: Sequence[int] | None = None


@dataclass
class Rig:
    """A bound sampler with requests in slots."""

    processors: Sequence[LogitsProcessor] = ()
    sampler: TorchSampler = field(default_factory=TorchSampler)

    def __post_init__(self) -> None:
        self.sampler.bind(VOCAB, KNOWN, 16, self.processors)
        self.tokens, self.lengths = np.zeros((16, 256), np.int32), np.zeros(16, np.int32)

    def append(self, slot: int, *tokens: int) -> None:
        """Tokens that a slot's request has generated since."""
        self.tokens[slot, self.lengths[slot] : self.lengths[slot] + len(tokens)] = tokens
        self.lengths[slot] += len(tokens)

    def add(
        self,
        slot: int,
        *,
        seed: int = 0,
        epoch: int = 1,
        stop_ids: Sequence[int] = (),
        prompt: Sequence[int] = (1,),
        output: Sequence[int] = (),
        words: Sequence[Sequence[int]] = (),
        **params: Any,
    ) -> Rig:
        """A request enters; ``words`` are the token sequences of its bad words, ``output`` what it has generated."""
        known = [*prompt, *output]
        self.tokens[slot, : len(known)], self.lengths[slot] = known, len(known)
        self.sampler.add(
            NewRequest(
                request_id=f"r{slot}",
                slot=slot,
                epoch=epoch,
                token_ids=np.array(known, np.int32),
                num_prompt=len(prompt),
                num_computed=0,
                bad_words=Ragged.from_rows(list(words)) if words else None,
                blocks=[],
                params=SamplingParams(**params),
                seed=seed,
                stop_ids=np.array(stop_ids, np.int32),
            )
        )
        return self

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        *,
        prompt_rows: Sequence[tuple[int, int, int, int, int]] = (),
        tokens: Any = None,
        bitmask: Tensor | None = None,
    ) -> Sampled:
        known = self.tokens if tokens is None else tokens
        return self.sampler.sample(logits, sample_rows(rows, len(logits), prompt_rows, known, bitmask, self.lengths))

    def draw(self, logits: Tensor, rows: Sequence[Row], **given: Any) -> list[list[int]]:
        sampled = self.sample(logits, rows, **given)
        assert not sampled.errors, sampled.errors
        return [sampled.accepted.row(i).tolist() for i in range(len(rows))]


def sample_rows(
    rows: Sequence[Row],
    count: int,
    prompt_rows: Sequence[tuple[int, int, int, int, int]] = (),
    tokens: Any = None,
    bitmask: Tensor | None = None,
    lengths: Any = None,
) -> SampleRows:
    positions, slots, parents, trees = [], [], [], False
    for row in rows:
        trees |= row.parents is not None
        chain = list(range(-1, len(row.drafts) - 1)) if row.parents is None else list(row.parents)
        depth = [0]
        for parent in chain:
            depth.append(depth[1 + parent] + 1)
        positions += [row.position + d for d in depth]
        slots += [row.slot] * len(depth)
        parents.append(chain)
    for slot, _, _, _, number in prompt_rows:
        positions += [0] * number
        slots += [slot] * number
    assert len(positions) == count
    return SampleRows(
        plan_rows=np.arange(len(rows), dtype=np.int32),
        slots=np.array([row.slot for row in rows], np.int32),
        starts=np.concatenate([[0], np.cumsum([1 + len(row.drafts) for row in rows])]).astype(np.int32),
        positions=np.array(positions, np.int32),
        row_slots=np.array(slots, np.int32),
        drafts=Ragged.from_rows([list(row.drafts) for row in rows]),
        draft_parents=Ragged.from_rows(parents) if trees else None,
        prompt_rows=list(prompt_rows),
        bitmask=bitmask,
        constrained=None if bitmask is None else (bitmask != -1).any(1).numpy(),
        tokens=tokens,
        lengths=lengths,
    )


def make_logits(rows: int, *, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


class Add(LogitsProcessor):
    """Adds numbers to the logits of requests whose ``extra_args`` name it."""

    def __init__(self, name: str, delta: Tensor | float, *, keeps_argmax: bool = False) -> None:
        self.name, self.delta, self.slots = name, delta, set[int]()
        self.keeps_argmax = keeps_argmax  # type: ignore[misc]
        self.seen: list[list[int]] = []

    def add(self, request: NewRequest) -> bool:
        if self.name in (request.params.extra_args or {}):
            self.slots.add(request.slot)
        return request.slot in self.slots

    def remove(self, slot: int) -> None:
        self.slots.remove(slot)

    def apply(self, logits: Tensor, rows: SampleRows, selected: Tensor) -> Tensor:
        self.seen.append(rows.row_slots[selected.numpy()].tolist())
        assert logits.dtype == torch.float32
        logits[selected] += self.delta
        return logits
