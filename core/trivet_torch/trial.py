"""Measuring what the largest step takes, by carrying it out on a cache of one block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivet.plan import InputSource, LogitsRows, NewRequest, Ragged, StepPlan
from trivet.roles import AttentionSupport, KVGroup, KVLayout, KVStorage, LayerKVSpec
from trivet.sizing import choose_block_size

if TYPE_CHECKING:
    from trivet.plan import Int32

#: the block that all tables of a trial consist of; block 0 is the null block
_BLOCK = 1
#: what torch's allocator loses between blocks of memory that it cannot join, as a share of what a step takes
_FRAGMENTATION = 0.1
_PROC = Path("/proc/self")


def trial_layout(specs: Sequence[LayerKVSpec], support: Sequence[AttentionSupport]) -> KVLayout:
    """One block (and the null block) per layer, in a group per kind of layer."""
    size = choose_block_size(None, support)
    kinds: dict[tuple[Any, int | None], list[int]] = {}
    for spec in specs:
        kinds.setdefault((spec.kind, spec.window), []).append(spec.layer)
    groups = [
        KVGroup(index, tuple(layers), kind, size, window)
        for index, ((kind, window), layers) in enumerate(kinds.items())
    ]
    storage = tuple(KVStorage((spec.layer,), 1 + _BLOCK) for spec in specs)
    return KVLayout(tuple(specs), tuple(groups), storage)


def largest_step(
    layout: KVLayout,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    vocab_size: int,
    num_drafts: int = 0,
    params: Any = None,
) -> StepPlan:
    """A plan with as many tokens, rows and logits rows as a step may have, all in the same block.

    One row is a chunk as long as the budget allows, at the end of a context of the full length; the others are decodes,
    with ``num_drafts`` drafts each. All of them draw.
    """
    rows = min(max_num_seqs, max_num_batched_tokens)
    drafts = min(num_drafts, max_num_batched_tokens // rows - 1, max_model_len - 1)
    counts: Int32 = np.full(rows, 1 + drafts, np.int32)
    rest = max_num_batched_tokens - int(counts.sum())
    for row in range(rows):
        added = min(rest, max_model_len - int(counts[row]))
        counts[row] += added
        rest -= added
    computed = np.zeros(rows, np.int32)
    computed[0] = max_model_len - counts[0]
    known = (computed + counts - drafts).tolist()
    tokens = np.arange(max_model_len, dtype=np.int32) % vocab_size
    new = [
        NewRequest(
            request_id=f"trial-{row}",
            slot=row,
            epoch=row,
            token_ids=tokens[: known[row]],
            num_prompt=known[row],
            num_computed=int(computed[row]),
            blocks=[np.full(-(-(known[row] + drafts) // g.block_size), _BLOCK, np.int32) for g in layout.groups],
            params=params,
        )
        for row in range(rows)
    ]
    return StepPlan(
        0,
        new=new,
        slots=np.arange(rows, dtype=np.int32),
        epochs=np.arange(rows, dtype=np.int64),
        num_computed=computed,
        num_scheduled=counts,
        num_drafts=np.full(rows, drafts, np.int32),
        draft_ids=Ragged.from_rows([tokens[:drafts]] * rows) if drafts else None,
        lookahead=np.zeros(rows, np.int32),
        logits_rows=np.full(rows, LogitsRows.DRAFTS if drafts else LogitsRows.LAST, np.uint8),
        samples=np.ones(rows, np.bool_),
        pools=np.zeros(rows, np.bool_),
        input_source=np.full(rows, InputSource.KNOWN, np.uint8),
        tokens=Ragged.empty(rows),
        draft_k=np.full(rows, drafts, np.int32),
        adapter=np.full(rows, -1, np.int32),
    )


def measure(device: torch.device, step: Callable[[], None]) -> int | None:
    """Bytes that ``step`` takes at its peak, beyond what is in use before it; None where that cannot be told.

    On CUDA and ROCm: what torch has allocated at the peak of a second run (in the first one kernels are chosen and
    libraries take what they keep), with a margin for fragmentation, and what was taken past torch's allocator.
    Elsewhere: by how much the process grew, which is Linux' high-water mark of resident memory (set back first), or
    that of its whole life, where it grew. Memory that was freed before and is used again is not seen.
    """
    if device.type == "cuda":
        return _measure_device(device, step)
    return _measure_process(step)


def _measure_device(device: torch.device, step: Callable[[], None]) -> int:
    cuda = torch.cuda
    cuda.synchronize(device)
    cuda.empty_cache()
    allocated, reserved = cuda.memory_allocated(device), cuda.memory_reserved(device)
    free, _ = cuda.mem_get_info(device)
    step()
    cuda.synchronize(device)
    cuda.reset_peak_memory_stats(device)
    step()
    cuda.synchronize(device)
    peak = max(0, cuda.max_memory_allocated(device) - allocated)
    cuda.empty_cache()
    taken = free - cuda.mem_get_info(device)[0]
    outside = max(0, taken - (cuda.memory_reserved(device) - reserved))
    return int(peak * (1 + _FRAGMENTATION)) + outside


def _measure_process(step: Callable[[], None]) -> int | None:
    if _reset_high_water():
        before = _status("VmRSS")
        step()
        return max(0, _status("VmHWM") - before)
    before = _lifetime_peak()
    step()
    return (_lifetime_peak() - before) or None


def _reset_high_water() -> bool:
    """Set the process' high-water mark back to what is resident now, see proc_pid_clear_refs(5)."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(key: str) -> int:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_PROC / 'status'} has no {key}")


def _lifetime_peak() -> int:
    """The most that this process ever had in memory, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
