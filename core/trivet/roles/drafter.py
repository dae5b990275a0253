"""Role ``drafter``: proposes tokens that the next step verifies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trivet.plan import EMPTY_I32, Int32, NewRequest, Ragged
from trivet.roles.base import Role

if TYPE_CHECKING:
    from trivet.roles.attention import Attention
    from trivet.roles.kv import KVLayout, LayerKVSpec
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
    included. Everything is read-only.

    A drafter that runs a model of its own finds where keys and values go in ``tables[g][slot]``, the block ids of KV
    group ``g`` in token order: valid for the positions of this step's tokens and :attr:`Drafter.lookahead` more."""

    slots: Int32  #: [R]
    k: Int32  #: [R] proposals wanted, 0 = none
    tokens: Any
    lengths: Int32  #: [slots]
    batch: ForwardBatch | None = None
    output: ForwardOutput | None = None
    #: [R] ragged: the tokens that this step accepted, the row's own last; none where a row drew none
    accepted: Ragged = field(default_factory=Ragged.empty)
    #: [R] drafts that this step verified
    num_drafts: Int32 = field(default_factory=lambda: EMPTY_I32)
    #: [R] ragged: the accepted drafts as indices into the row's drafts, in order; None: chains, so they are the first
    path: Ragged | None = None
    tables: Sequence[Int32] = ()  #: per KV group [slots, max_blocks]
    block_sizes: Sequence[int] = ()  #: per KV group


class Drafter(Role):
    """Lives in the worker. Proposals change speed, never tokens. Of several drafters a request gets the first that
    serves it, and the others are not told of it."""

    role: ClassVar[str] = "drafter"
    #: most proposals per row and step that it is asked for, unless a scheduler asks for another number
    num_tokens: int = 0
    #: KV positions that it writes beyond the scheduled tokens. If it writes any, it is asked for so few proposals that
    #: the newest token and all of them but the last have a place, at the end of an output for none
    lookahead: int = 0
    #: whether it reads ``DraftInputs.output.hidden``
    wants_hidden: bool = False
    #: layers of the model, from 0, whose outputs it reads in ``DraftInputs.output.layer_outputs``
    hidden_layers: tuple[int, ...] = ()
    #: whether :meth:`propose` is called in every step with rows, also when no row wants proposals: a drafter with a
    #: cache of its own has to see every token, those of prompt chunks too
    follows: bool = False

    def kv_specs(self) -> list[LayerKVSpec]:
        """Layers of its own that need KV storage, numbered from 0; the runner puts them behind the model's."""
        return []

    def bind(self, attention: Attention, layout: KVLayout, first_layer: int) -> None:
        """Called after the storage was allocated: layer ``i`` of :meth:`kv_specs` is ``first_layer + i`` in ``layout``
        and for ``attention``."""

    def serves(self, request: NewRequest) -> bool:
        """Whether it proposes for ``request``; asked when the request enters its slot."""
        return True

    def add(self, request: NewRequest) -> None:
        """A request that it serves enters a slot."""

    def remove(self, slot: int) -> None:
        """A request that it serves leaves its slot."""

    @abstractmethod
    def propose(self, inputs: DraftInputs) -> Drafts:
        """Proposals for every row with ``k > 0``. Bound to the ``trivet_draft`` phase, through which several drafters
        are asked one after the other; rows that another one serves have ``k`` 0."""
