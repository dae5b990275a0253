"""Role ``drafter``: proposes tokens that the next step verifies."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.plan import Int32, NewRequest, Ragged
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.kv import LayerKVSpec
    from trivet.roles.model import ForwardBatch, ForwardOutput


@dataclass(slots=True)
class Drafts:
    """Proposals per plan row (empty rows: none); ``parents`` index within the row, -1 = the last accepted token;
    None: chains. Parents come before their children."""

    tokens: Ragged
    parents: Ragged | None = None


@dataclass(slots=True)
class DraftInputs:
    """What a drafter sees of a step: ``tokens[slot, :lengths[slot]]`` are a slot's known tokens, the accepted ones
    included."""

    slots: Int32  #: [R]
    k: Int32  #: [R] proposals wanted, 0 = none
    tokens: Any
    lengths: Int32  #: [slots]
    batch: ForwardBatch | None = None
    output: ForwardOutput | None = None


class Drafter(Role):
    """Lives in the worker. Proposals change speed, never tokens."""

    role: ClassVar[str] = "drafter"
    #: proposals per step when a request does not say
    num_tokens: int = 0
    #: KV positions that it writes beyond the scheduled tokens
    lookahead: int = 0
    #: whether it reads ``DraftInputs.output.hidden``
    wants_hidden: bool = False

    def kv_specs(self) -> list[LayerKVSpec]:
        """Layers of its own that need KV storage (numbered after the model's)."""
        return []

    def add(self, request: NewRequest) -> None:
        """A request enters a slot."""

    def remove(self, slot: int) -> None:
        """A request leaves its slot."""

    @abstractmethod
    def propose(self, inputs: DraftInputs) -> Drafts:
        """Proposals for every row with ``k > 0``. Bound to the ``trivet_draft`` phase."""
