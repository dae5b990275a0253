"""The step plan: what the engine asks the workers to do in one step.

A plan is pure data, holds no tensors, and is read-only once the schedule phase has returned it, because blocks have
been allocated for exactly this plan. Rows are parallel arrays; ``R`` is the number of scheduled rows. Ragged values
(new blocks, token ids, drafts) are a flat array with offsets, see :class:`Ragged`. Every executor gets the same plan,
in memory or as bytes (:mod:`trivet.wire`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]

EMPTY_I32: Int32 = np.empty(0, np.int32)
EMPTY_I64: Int64 = np.empty(0, np.int64)
EMPTY_U8: UInt8 = np.empty(0, np.uint8)
EMPTY_BOOL: Bool = np.empty(0, np.bool_)


class LogitsRows(IntEnum):
    """Which of a row's positions reach the LM head."""

    NONE = 0  #: none: a chunk in the middle of known tokens
    LAST = 1  #: the last scheduled position
    DRAFTS = 2  #: the last position before the drafts, and every draft position
    PROMPT = 3  #: every scheduled position (prompt logprobs); the last one also samples if ``samples`` says so


class InputSource(IntEnum):
    """Where the worker finds a row's newest input token."""

    KNOWN = 0  #: the ids are in the plan or were in an earlier one
    DEVICE = 1  #: sampled by the previous step, still on the device; the engine has not seen it yet


class Task(IntEnum):
    """What a request wants of its tokens."""

    GENERATE = 0
    EMBED = 1
    SCORE = 2
    CLASSIFY = 3


@dataclass(slots=True)
class Ragged:
    """Rows of different lengths in one flat array: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    offsets: Int32
    values: Int32

    @classmethod
    def empty(cls, rows: int = 0) -> Ragged:
        """``rows`` rows without values."""
        return cls(np.zeros(rows + 1, np.int32), EMPTY_I32)

    @classmethod
    def from_rows(cls, rows: list[Any]) -> Ragged:
        """One row per item; each item is a sequence of ints."""
        lengths = [len(r) for r in rows]
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        values = np.concatenate([np.asarray(r, np.int32) for r in rows]) if offsets[-1] else EMPTY_I32
        return cls(offsets, values)

    def row(self, index: int) -> Int32:
        """A view of row ``index``."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Int32:
        """``[rows]`` number of values in each row."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(slots=True)
class NewRequest:
    """A request as the workers get it, whole, once per admission (again after a preemption, with a new epoch).

    ``token_ids`` ``[num_tokens]`` int32 are all tokens known at admission: the prompt, then the outputs committed
    before a preemption. ``blocks`` holds, per KV group, the ids of the blocks it has at admission (prefix hits
    included)."""

    request_id: str
    slot: int
    epoch: int
    token_ids: Int32
    num_prompt: int
    num_computed: int
    blocks: list[Int32]
    params: Any = None  #: SamplingParams or PoolingParams
    task: int = Task.GENERATE
    seed: int = 0  #: never None: an unseeded request was given one at admission
    #: ids that end the output: ``stop_token_ids`` and, unless ``ignore_eos``, the model's ends of sequence
    stop_ids: Int32 = field(default_factory=lambda: EMPTY_I32)
    #: token sequences that the output must not contain, one per row
    bad_words: Ragged | None = None
    adapter: str | None = None
    parent_slot: int = -1  #: the slot this request was forked from, or -1
    resumed: bool = False  #: True when this admission follows a preemption
    extra: dict[str, bytes] = field(default_factory=dict)  #: plugins' own data, by plugin name


@dataclass(slots=True)
class BlockDelta:
    """Blocks appended to tables in this step, for one KV group: row ``i`` belongs to ``slots[i]``."""

    slots: Int32
    blocks: Ragged


@dataclass(slots=True)
class Transfer:
    """A movement of KV blocks to or from somewhere outside the pool; the worker reports it done under ``transfer_id``.

    A *load* fills ``blocks``, a *store* reads them. ``keys`` name the blocks to the other side, one per block, group
    after group; the null block has an empty key. ``blocks[g]`` are block ids of KV group ``g``. A load with
    ``blocking`` set must be complete before the forward of the same step reads; otherwise the request is held until
    the transfer is reported. A store with ``blocking`` set has read its blocks before the same step writes anything.
    """

    transfer_id: int
    endpoint: str  #: the plugin that carries it out, e.g. ``offload``
    slot: int
    epoch: int
    start_token: int  #: first token position that the blocks cover
    num_tokens: int
    blocks: list[Int32]
    keys: list[bytes] = field(default_factory=list)
    blocking: bool = False
    payload: bytes = b""


@dataclass(slots=True)
class MultimodalRange:
    """Positions ``[start, start + length)`` of a slot, all within this step's tokens, take embeddings of item ``item``
    instead of token embeddings. The item's data is in the request's ``NewRequest.extra``."""

    slot: int
    item: str
    start: int
    length: int
    offset: int  #: first embedding row of the item to use


@dataclass(slots=True)
class StepPlan:
    """One step. Arrays without another shape are ``[R]``, in row order; all ids are of requests in ``slots``."""

    step_id: int
    #: admitted since the previous plan; rows below may name them at once
    new: list[NewRequest] = field(default_factory=list)
    #: ``[n]`` slots of ``new`` that were preempted before (each also has ``resumed`` set)
    resumed: Int32 = field(default_factory=lambda: EMPTY_I32)
    #: ``[n]`` slots whose request lost its blocks since the previous plan, with the epoch that ended
    preempted: Int32 = field(default_factory=lambda: EMPTY_I32)
    preempted_epochs: Int64 = field(default_factory=lambda: EMPTY_I64)
    #: ``[n]`` slots whose request ended since the previous plan, with its epoch; the worker drops its state
    finished: Int32 = field(default_factory=lambda: EMPTY_I32)
    finished_epochs: Int64 = field(default_factory=lambda: EMPTY_I64)

    slots: Int32 = field(default_factory=lambda: EMPTY_I32)
    epochs: Int64 = field(default_factory=lambda: EMPTY_I64)
    #: tokens whose KV precedes this step's, and tokens to compute now (drafts included)
    num_computed: Int32 = field(default_factory=lambda: EMPTY_I32)
    num_scheduled: Int32 = field(default_factory=lambda: EMPTY_I32)
    #: the last ``num_drafts`` of a row's scheduled tokens are drafts
    num_drafts: Int32 = field(default_factory=lambda: EMPTY_I32)
    #: draft ids per row when the engine holds them; None: the worker kept its own proposals
    draft_ids: Ragged | None = None
    #: parent of each draft within its row, -1 = the last known token; None: every row is a chain
    draft_parents: Ragged | None = None
    #: KV positions reserved beyond the scheduled tokens (a drafter writes there)
    lookahead: Int32 = field(default_factory=lambda: EMPTY_I32)
    #: per KV group: blocks appended in this step to requests that were already known
    new_blocks: list[BlockDelta] = field(default_factory=list)
    #: per KV group ``[n, 2]`` (source, destination), to be copied before anything is written
    copies: list[Int32] = field(default_factory=list)
    #: per KV group ``[n]`` blocks to fill with zeros before anything is written
    zeroing: list[Int32] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    #: :class:`LogitsRows` per row
    logits_rows: UInt8 = field(default_factory=lambda: EMPTY_U8)
    #: whether the row draws tokens / is pooled at the end of this step
    samples: Bool = field(default_factory=lambda: EMPTY_BOOL)
    pools: Bool = field(default_factory=lambda: EMPTY_BOOL)
    #: :class:`InputSource` per row
    input_source: UInt8 = field(default_factory=lambda: EMPTY_U8)
    #: known ids that the workers have not been sent yet, ending at the row's last known token
    tokens: Ragged = field(default_factory=Ragged.empty)
    #: drafts wanted from the drafter after this step (0: none)
    draft_k: Int32 = field(default_factory=lambda: EMPTY_I32)
    #: index into ``adapters``, -1 = base model
    adapter: Int32 = field(default_factory=lambda: EMPTY_I32)
    adapters: list[str] = field(default_factory=list)
    multimodal: list[MultimodalRange] = field(default_factory=list)
    #: plugins' own data, by plugin name
    extensions: dict[str, bytes] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Scheduled rows."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows."""
        return int(np.add.reduce(self.num_scheduled)) if len(self.num_scheduled) else 0
