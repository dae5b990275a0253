"""What the sampler knows of each slot, in columns."""

from __future__ import annotations

import numpy as np

from trivet.plan import Bool, Float32, Int32, Int64, NewRequest, Task

#: no logprobs wanted; -1 stands for all tokens
NO_LOGPROBS = -2


class SlotState:
    """Columns ``[max_num_seqs]``, and what only few slots have."""

    def __init__(self, max_num_seqs: int, num_processors: int) -> None:
        n = max_num_seqs
        self.epoch: Int64 = np.full(n, -1, np.int64)  #: -1: the slot is free
        self.greedy: Bool = np.ones(n, np.bool_)
        self.temperature: Float32 = np.ones(n, np.float32)
        self.top_k: Int64 = np.zeros(n, np.int64)
        self.top_p = np.ones(n, np.float64)
        self.min_p = np.zeros(n, np.float64)
        self.seed: Int64 = np.zeros(n, np.int64)
        self.min_tokens: Int32 = np.zeros(n, np.int32)
        self.logprobs: Int32 = np.full(n, NO_LOGPROBS, np.int32)
        self.prompt_logprobs: Int32 = np.full(n, NO_LOGPROBS, np.int32)
        #: which logits processors a slot wants, ``[num_processors, max_num_seqs]``
        self.wants: Bool = np.zeros((num_processors, n), np.bool_)
        self.stop_ids: dict[int, Int32] = {}

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
        if params.logprobs is not None:
            self.logprobs[slot] = params.logprobs
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[slot] = params.prompt_logprobs
        if params.min_tokens and len(request.stop_ids):
            self.min_tokens[slot] = params.min_tokens
            self.stop_ids[slot] = request.stop_ids

    def clear(self, slot: int) -> None:
        """Free a slot."""
        self.epoch[slot] = -1
        self.greedy[slot] = True
        self.temperature[slot] = self.top_p[slot] = 1
        self.top_k[slot] = self.min_p[slot] = self.min_tokens[slot] = self.seed[slot] = 0
        self.logprobs[slot] = self.prompt_logprobs[slot] = NO_LOGPROBS
        self.wants[:, slot] = False
        self.stop_ids.pop(slot, None)
