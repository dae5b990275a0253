"""What KV memory holds, with the real scheduler and the real caches and no model.

The comparison of the PagedAttention paper (Kwon et al., SOSP 2023, arXiv 2309.06180, figure 2): which share of the
memory holds the keys and values of tokens, and what becomes of the rest, for caches that reserve ahead and for one that
pages. Requests are always waiting, so memory is what limits how many run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trivet.bench.lengths import LengthDistribution
from trivet.errors import CacheMemoryError, TrivetError
from trivet.plan import Int32, StepPlan
from trivet.roles import PendingStep
from trivet.simulation import IdTokenizer, SimulatedExecutor, simple_layers

CACHES: Mapping[str, Mapping[str, Any]] = {
    "contiguous-max": {"use": "contiguous", "reservation": "max", "allocator": "buddy", "block_size": 1},
    "contiguous-pow2": {"use": "contiguous", "reservation": "pow2", "allocator": "buddy", "block_size": 1},
    "contiguous-oracle": {"use": "contiguous", "reservation": "oracle", "allocator": "buddy", "block_size": 1},
    "paged": {"use": "paged", "prefix_caching": False},
}
"""Options of the ``cache`` role by the name of the case. The contiguous caches reserve single tokens, as those of the
paper did; equal prefixes are not shared, and what a cache keeps of requests that have left would not count."""

PAPER = {"contiguous-max": 0.204, "contiguous-pow2": 0.268, "contiguous-oracle": 0.382, "paged": 0.963}
"""Shares of token states that the paper reports, with the lengths of ShareGPT, OPT-13B on an A100 of 40 GB."""

_WARM_UP = 0.2  # share of the requests that have to end first: those of the beginning have started together


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Shares of the KV memory, averages over steps; the first four add up to 1."""

    cache: str
    token_states: float  #: hold keys and values
    reservation: float  #: held for tokens that the same request will have later
    internal_fragmentation: float  #: held by requests and never used by them
    external_fragmentation: float  #: not given to a request: free but not usable just now, or lost to rounding up
    mean_running: float  #: requests that run at once
    num_steps: int  #: that were looked at
    num_preemptions: int  #: in these steps


def enough_requests(lengths: LengthDistribution, kv_tokens: int) -> int:
    """Requests after which averages are steady: a dozen times as many as a memory full of tokens has at once."""
    return max(math.ceil(12 * kv_tokens / lengths.mean_held), 60)


class _Meter(SimulatedExecutor):
    """Looks at the memory whenever a step is run: after it was planned, before any request of it ends."""

    def __init__(self, max_model_len: int, max_num_seqs: int, on_step: Callable[[StepPlan], None]) -> None:
        # One layer, a token of two bytes: only counts of tokens matter.
        layers = simple_layers(1, num_kv_heads=1, head_dim=1, dtype="int8")
        super().__init__(layers, vocab_size=2, max_model_len=max_model_len, available_bytes=0)
        #: ``[max_num_seqs]`` blocks that each slot holds; meaningless for slots that are empty
        self.held: Int32 = np.zeros(max_num_seqs, np.int32)
        self._on_step = on_step

    def submit(self, plan: StepPlan) -> PendingStep:
        """Counts the blocks of every slot like a worker, from what plans say."""
        for new in plan.new:
            self.held[new.slot] = len(new.blocks[0])
        (appended,) = plan.new_blocks
        self.held[appended.slots] += appended.blocks.lengths
        self._on_step(plan)
        return super().submit(plan)


class _Study:
    """One engine with its memory, and what was seen of it."""

    def __init__(self, cache: str, num_requests: int, kv_tokens: int, max_model_len: int, block_size: int) -> None:
        from trivet.engine import Engine

        options = {"block_size": block_size, **CACHES[cache]}
        self._block_size = int(options["block_size"])
        blocks = kv_tokens // self._block_size
        self.total = blocks * self._block_size  #: tokens that the memory holds
        self._warm_up = math.ceil(_WARM_UP * num_requests)
        # Neither slots nor the token budget are to be what limits.
        slots = max(min(num_requests, blocks), 1)
        scheduler = {
            "use": "continuous",
            "max_num_seqs": slots,
            "max_num_batched_tokens": 2 * kv_tokens,
            # The queue is never empty here. What the cache wastes is measured, not the scheduler's prudence.
            "max_recomputed_share": 1,
        }
        plugins = {"cache": {**options, "num_blocks": 1 + blocks}, "scheduler": scheduler}
        self._meter = _Meter(max_model_len, slots, self._look)
        config = {"model": "none", "max_model_len": max_model_len, "plugins": plugins}
        self.engine = Engine(config, [self._meter, IdTokenizer(2)])
        self._ended = 0
        #: per step: tokens computed, tokens to come that have their place, places never used, running requests
        self.seen: list[tuple[int, int, int, int]] = []
        self.num_preemptions = 0

    def _look(self, plan: StepPlan) -> None:
        if self._ended < self._warm_up or not self._waiting:
            return
        table = self.engine.table
        slots = table.order
        held, computed, final = (
            self._meter.held[slots] * self._block_size,
            table.num_computed[slots],
            table.max_total[slots],
        )
        used = np.minimum(held, final)
        self.seen.append((int(computed.sum()), int((used - computed).sum()), int((held - used).sum()), len(slots)))
        self.num_preemptions += len(plan.preempted)

    @property
    def _waiting(self) -> int:
        return self.engine.parts.scheduler.num_waiting

    def run(self, prompts: Int32, outputs: Int32, on_ended: Callable[[int], None] | None) -> None:
        """Queue all requests, and step until none waits any more."""
        from trivet_schemas.sampling import SamplingParams

        engine = self.engine
        for i, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
            engine.add_request(str(i), [0] * prompt, SamplingParams(max_tokens=output, ignore_eos=True))
        while self._waiting:
            count = len(engine.step().finished)
            self._ended += count
            if count and on_ended is not None:
                on_ended(self._ended)
            if engine.fault is not None:
                raise RuntimeError(engine.fault) from engine.fault_cause


def _make_study(cache: str, num_requests: int, kv_tokens: int, max_model_len: int, block_size: int) -> _Study:
    size = int({"block_size": block_size, **CACHES[cache]}["block_size"])
    if kv_tokens < size:
        raise TrivetError(
            f"{kv_tokens} tokens of KV memory are less than one block of {size} tokens: give more tokens, or a smaller "
            "block size"
        )
    try:
        return _Study(cache, num_requests, kv_tokens, max_model_len, block_size)
    except CacheMemoryError as error:
        if error.fits_tokens is None:
            raise  # it is not about the length of a request
        raise TrivetError(
            f"{kv_tokens} tokens of KV memory are too few: the cache {cache!r} cannot hold one request of "
            f"{max_model_len} tokens in them, rounded up as it does; at most {error.fits_tokens} fit"
        ) from error


def check_setting(cache: str, *, kv_tokens: int, max_model_len: int, block_size: int) -> None:
    """Raise TrivetError for what :func:`measure` would refuse, before the time for other caches is spent."""
    _make_study(cache, 1, kv_tokens, max_model_len, block_size).engine.shutdown()


def measure(
    cache: str,
    lengths: LengthDistribution,
    *,
    num_requests: int,
    kv_tokens: int,
    max_model_len: int,
    block_size: int,
    seed: int = 0,
    on_ended: Callable[[int], None] | None = None,
) -> MemoryUse:
    """Run requests through an engine without a model, and look at its KV memory in every step.

    Steps count from when a fifth of the requests have ended until none waits any more.

    Args:
        cache: A name of :data:`CACHES`.
        lengths: How long requests are.
        num_requests: Requests; all are queued at once.
        kv_tokens: Tokens that the memory holds; whole blocks of it are used.
        max_model_len: Context length.
        block_size: Tokens per block of the paged cache.
        seed: Of the lengths.
        on_ended: Called with the number of requests that have ended so far.

    Raises:
        trivet.errors.TrivetError: ``kv_tokens`` is too small for one request of ``max_model_len`` tokens, or there are
            so few requests that none waits for memory when the measurement would begin.
    """
    study = _make_study(cache, num_requests, kv_tokens, max_model_len, block_size)
    try:
        study.run(*lengths.draw(num_requests, max_model_len, seed), on_ended)
    finally:
        study.engine.shutdown()
    if not study.seen:
        raise TrivetError(
            f"{num_requests} requests are too few for a memory of {kv_tokens} tokens: with the cache {cache!r} none "
            "waits for memory by the time a fifth of them have ended"
        )
    real, ahead, unused, running = np.mean(study.seen, axis=0).tolist()
    return MemoryUse(
        cache,
        token_states=real / study.total,
        reservation=ahead / study.total,
        internal_fragmentation=unused / study.total,
        external_fragmentation=1 - (real + ahead + unused) / study.total,
        mean_running=running,
        num_steps=len(study.seen),
        num_preemptions=study.num_preemptions,
    )
