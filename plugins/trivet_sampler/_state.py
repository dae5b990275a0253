"""What the sampler knows of each slot, in columns."""

from __future__ import annotations

import numpy as np

from trivet.plan import EMPTY_I32, Bool, Float32, Int32, Int64, NewRequest, Task
from trivet_sampler._history import History
from trivet_sampler._lists import SlotLists
from trivet_sampler._words import BadWords
from trivet_schemas.sampling import SamplingParams

#: no logprobs wanted; -1 stands for all tokens
NO_LOGPROBS = -2


class SlotState:
    """Columns ``[max_num_seqs]``, and what only few slots have.

    Args:
        max_num_seqs: Slots.
        vocab_size: Logits of a row.
        num_processors: Logits processors.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, num_processors: int) -> None:
        n = max_num_seqs
        self._vocab_size = vocab_size
        self.epoch: Int64 = np.full(n, -1, np.int64)  #: -1: the slot is free
        #: slots that want more than their likeliest token; while there are none, no column is looked at
        self.special: set[int] = set()
        self.greedy: Bool = np.ones(n, np.bool_)
        self.temperature: Float32 = np.ones(n, np.float32)
        self.top_k: Int64 = np.zeros(n, np.int64)
        self.top_p = np.ones(n, np.float64)
        self.min_p = np.zeros(n, np.float64)
        self.seed: Int64 = np.zeros(n, np.int64)
        self.min_tokens: Int32 = np.zeros(n, np.int32)
        self.logprobs: Int32 = np.full(n, NO_LOGPROBS, np.int32)
        self.prompt_logprobs: Int32 = np.full(n, NO_LOGPROBS, np.int32)
        self.repetition: Float32 = np.ones(n, np.float32)
        self.frequency: Float32 = np.zeros(n, np.float32)
        self.presence: Float32 = np.zeros(n, np.float32)
        #: slots whose logits are changed in every step, other than by grammars and processors
        self.changes: Bool = np.zeros(n, np.bool_)
        #: which logits processors a slot wants, ``[num_processors, max_num_seqs]``
        self.wants: Bool = np.zeros((num_processors, n), np.bool_)
        self.has_allowed: Bool = np.zeros(n, np.bool_)
        #: ``[max_num_seqs, ceil(vocab_size / 32)]`` bits of allowed ids; untouched pages cost no memory
        self.allowed: Int32 = np.zeros((n, -(-vocab_size // 32)), np.int32)
        self.stops = SlotLists(n, EMPTY_I32)  #: ids that end the output of slots with ``min_tokens``
        self.bias = SlotLists(n, EMPTY_I32, np.empty(0, np.float32))  #: ids and biases
        self.words = BadWords(n)
        self.history = History(n, vocab_size)
        self.logprob_ids: dict[int, Int32] = {}  #: slot → ids whose logprobs are wanted

    def add(self, request: NewRequest) -> None:
        """Fill a slot; a request that generates nothing takes the defaults."""
        slot, params = request.slot, request.params
        self.clear(slot)
        self.epoch[slot] = request.epoch
        # Seeds are 64 bits of a key, whatever their sign.
        self.seed[slot] = np.uint64(request.seed & (2**64 - 1)).astype(np.int64)
        if request.task != Task.GENERATE:
            return
        # Only the likeliest token survives these, so the draw is decided.
        self.greedy[slot] = params.greedy or params.top_k == 1 or params.min_p >= 1.0
        if not self.greedy[slot]:
            self.temperature[slot] = params.temperature
            self.top_k[slot], self.top_p[slot], self.min_p[slot] = params.top_k, params.top_p, params.min_p
        if params.logprob_token_ids is not None:
            self.logprob_ids[slot] = np.array(params.logprob_token_ids, np.int32)
            self.logprobs[slot] = 0
        if params.logprobs is not None:
            self.logprobs[slot] = params.logprobs
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[slot] = params.prompt_logprobs
        if params.min_tokens and len(request.stop_ids):
            self.min_tokens[slot] = params.min_tokens
            self.stops.set(slot, request.stop_ids)
        self._add_changes(request, params)
        asks = self.logprobs[slot] != NO_LOGPROBS or self.min_tokens[slot] > 0
        if asks or self.changes[slot] or not self.greedy[slot]:
            self.special.add(slot)

    def _add_changes(self, request: NewRequest, params: SamplingParams) -> None:
        slot = request.slot
        if params.allowed_token_ids is not None:
            bits = np.zeros(self.allowed.shape[1] * 32, np.bool_)
            bits[params.allowed_token_ids] = True
            self.allowed[slot] = np.packbits(bits, bitorder="little").view(np.int32)
            self.has_allowed[slot] = True
        if request.bad_words is not None and len(request.bad_words):
            self.words.add(slot, request.bad_words, request.num_prompt)
        if params.logit_bias:
            ids, bias = np.array(list(params.logit_bias), np.int32), np.array(list(params.logit_bias.values()))
            self.bias.set(slot, ids, bias.astype(np.float32))
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot], self.presence[slot] = params.frequency_penalty, params.presence_penalty
        repeats = params.repetition_penalty != 1.0
        if repeats or params.frequency_penalty or params.presence_penalty:
            self.history.add(request, with_prompt=repeats)
        self.changes[slot] = (
            self.has_allowed[slot] or self.words.has[slot] or self.bias.has[slot] or self.history.has[slot]
        )

    def changing(self, slot: int, position: int) -> list[str]:
        """The request's parameters that change logits at an output position, in their order."""
        found = {
            "allowed_token_ids": self.has_allowed[slot],
            "bad_words": self.words.has[slot],
            "min_tokens": position < self.min_tokens[slot],
            "logit_bias": self.bias.has[slot],
            "repetition_penalty": self.repetition[slot] != 1,
            "frequency_penalty": self.frequency[slot] != 0,
            "presence_penalty": self.presence[slot] != 0,
        }
        return [name for name, there in found.items() if there]

    def clear(self, slot: int) -> None:
        """Free a slot."""
        self.special.discard(slot)
        self.epoch[slot] = -1
        self.greedy[slot] = True
        self.temperature[slot] = self.top_p[slot] = self.repetition[slot] = 1
        self.top_k[slot] = self.min_p[slot] = self.min_tokens[slot] = self.seed[slot] = 0
        self.frequency[slot] = self.presence[slot] = 0
        self.logprobs[slot] = self.prompt_logprobs[slot] = NO_LOGPROBS
        self.wants[:, slot] = False
        self.changes[slot] = self.has_allowed[slot] = False
        self.stops.clear(slot)
        self.bias.clear(slot)
        self.words.remove(slot)
        self.history.remove(slot)
        self.logprob_ids.pop(slot, None)
