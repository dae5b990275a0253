"""Log-probabilities of the raw model, for chosen tokens and the most likely ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trivet.result import TokenLogprobs
from trivet_kernels.reference.sampling import grouped, top
from trivet_kernels.sampling import fused

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.plan import Int64

#: logits that are worked on at once: few enough to stay in a processor's cache
_BLOCK = 1 << 20
#: on a GPU, enough to fill it
_FUSED_BLOCK = 1 << 26
#: likeliest tokens that a GPU lists one after the other; more are sorted for
_MAX_FUSED = 64


@dataclass(slots=True)
class Wanted:
    """A request's logprobs: of ``tokens[i]`` from logits row ``rows[i]``, and of the ``k`` most likely (-1: all)."""

    k: int
    rows: Int64
    tokens: Int64


def logprobs(logits: Tensor, wanted: list[Wanted], size: int) -> list[TokenLogprobs]:
    """Logprobs of each item of ``wanted``, NaN where a row of logits has NaN.

    Probabilities are shares of all that the model gives logits for; only ids below ``size`` are listed and count for
    ranks.

    Args:
        logits: ``[L, vocab_size]``, not changed.
        wanted: What to compute; items that want equally many alternatives are computed together.
        size: Ids that the tokenizer knows.
    """
    out: dict[int, TokenLogprobs] = {}
    for k in {item.k for item in wanted}:
        members = [index for index, item in enumerate(wanted) if item.k == k]
        rows = torch.from_numpy(np.concatenate([wanted[i].rows for i in members])).to(logits.device)
        tokens = torch.from_numpy(np.concatenate([wanted[i].tokens for i in members])).to(logits.device)
        step = max(1, (_FUSED_BLOCK if fused(logits) else _BLOCK) // logits.shape[1])
        blocks = [
            _block(logits[rows[at : at + step]], tokens[at : at + step], size if k < 0 else min(k, size), size)
            for at in range(0, len(rows), step)
        ]
        ids, values, ranks = (torch.cat(parts).cpu().numpy() for parts in zip(*blocks, strict=True))
        at = 0
        for index in members:
            part = slice(at, at + len(wanted[index].rows))
            out[index] = TokenLogprobs(ids[part], values[part], ranks[part])
            at = part.stop
    return [out[index] for index in range(len(wanted))]


def _block(logits: Tensor, tokens: Tensor, k: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    if fused(logits) and k <= _MAX_FUSED:
        from trivet_kernels.triton import logprobs as kernels

        return kernels.logprobs(logits, tokens, k, size)
    logits = logits.float()
    total = logits.logsumexp(1, keepdim=True)
    ids = tokens[:, None]
    chosen = logits.gather(1, ids)
    ahead = (logits[:, :size] > chosen).sum(1)
    values = chosen
    if k > 0:
        likeliest, likeliest_ids = top(grouped(logits, size), k)
        ids, values = torch.cat([ids, likeliest_ids], 1), torch.cat([chosen, likeliest], 1)
    return ids.int(), values - total, (ahead + 1).int()
