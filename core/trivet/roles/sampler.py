"""Role ``sampler``: logits to tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.plan import Bool, Int32, NewRequest, Ragged
from trivet.result import PromptLogprobs, RequestFailure, RowLogprobs
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.logits_processor import LogitsProcessor


@dataclass(slots=True)
class SampleRows:
    """Which logits rows belong to which request. ``L`` logits rows, of ``S`` sampling plan rows.

    A plan row with ``d`` drafts has ``d + 1`` consecutive logits rows (the position before the drafts, then each
    draft). Rows that exist for prompt logprobs alone are listed in ``prompt_rows`` and are not sampled."""

    plan_rows: Int32  #: [S] row of the plan
    slots: Int32  #: [S]
    starts: Int32  #: [S + 1] first logits row of each sampling row
    positions: Int32  #: [L] output position that a token drawn from this row would get (0 = first output token)
    row_slots: Int32  #: [L] slot of each logits row
    drafts: Ragged  #: [S] draft ids under verification
    draft_parents: Ragged | None  #: [S] tree parents, None: chains
    #: (slot, epoch, first prompt position predicted, first logits row, rows): prompt logprobs to compute
    prompt_rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    #: [L, ceil(vocab / 32)] int32 or None: allowed tokens (bit set) per logits row, from grammars
    bitmask: Any = None
    #: [L] with a bitmask: rows of which it forbids some token, so that nobody reads it back to know; None: any may be
    constrained: Bool | None = None
    #: known tokens of a slot: ``tokens[slot, :lengths[slot]]``, the prompt first (numpy int32, read-only)
    tokens: Any = None
    lengths: Int32 | None = None  #: [slots] int32


@dataclass(slots=True)
class Sampled:
    """``accepted`` ``[S]`` rows: accepted drafts, then one token of the row's own; ``path`` the accepted nodes of a
    tree."""

    accepted: Ragged
    logprobs: list[RowLogprobs] = field(default_factory=list)  #: ``row`` indexes sampling rows
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    errors: list[RequestFailure] = field(
        default_factory=list
    )  #: rows with NaN or no token left; their accepted is empty
    path: Ragged | None = None  #: [S] indices of accepted drafts within the row (trees only)


class Sampler(Role):
    """Draws tokens for the whole batch. State is kept by slot, which is stable while a request runs."""

    role: ClassVar[str] = "sampler"
    #: names of the SamplingParams fields that are implemented; others are refused at admission when set
    fields: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def bind(
        self, vocab_size: int, tokenizer_size: int, max_num_seqs: int, processors: Sequence[LogitsProcessor]
    ) -> None:
        """Called once. Ids from ``tokenizer_size`` on (padding rows of the LM head) are never drawn."""

    @abstractmethod
    def add(self, request: NewRequest) -> None:
        """A request enters a slot (again, after a preemption)."""

    @abstractmethod
    def remove(self, slot: int) -> None:
        """A request leaves its slot."""

    @abstractmethod
    def sample(self, logits: Any, rows: SampleRows) -> Sampled:
        """Draw from ``logits`` ``[L, vocab_size]`` (may be changed in place). A row's result depends on nothing but
        its own logits, parameters, seed and tokens. Bound to the ``trivet_sample`` phase."""
