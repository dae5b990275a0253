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

    from trivet.plan import Int32, Int64

#: logits that are worked on at once: few enough to stay in a processor's cache
_BLOCK = 1 << 20
#: on a GPU, enough to fill it
_FUSED_BLOCK = 1 << 26
#: likeliest tokens that a GPU lists one after the other; more are sorted for
_MAX_FUSED = 64


@dataclass(slots=True)
class Wanted:
    """A request's logprobs: of ``tokens[i]`` from logits row ``rows[i]``, of the ``k`` most likely (-1: all), and of
    the ids ``asked`` for."""

    k: int
    rows: Int64
    tokens: Int64
    asked: Int32 | None = None


def logprobs(logits: Tensor, wanted: list[Wanted], size: int) -> list[TokenLogprobs]:
    """Logprobs of each item of ``wanted``, NaN where a row of logits has NaN.

    Columns are the token itself, the most likely ones, and those that are asked for. Probabilities are shares of all
    that the model gives logits for; only ids below ``size`` are listed and count for ranks.

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
    for index, item in enumerate(wanted):
        if item.asked is not None:
            out[index] = _with_asked(out[index], logits, item.rows, item.tokens, item.asked)
    return [out[index] for index in range(len(wanted))]


def _with_asked(values: TokenLogprobs, logits: Tensor, rows: Int64, tokens: Int64, asked: Int32) -> TokenLogprobs:
    index = torch.from_numpy(rows).to(logits.device)[:, None]
    ids = np.concatenate([tokens[:, None], np.tile(asked.astype(np.int64), (len(rows), 1))], 1)
    found = logits[index, torch.from_numpy(ids).to(logits.device)].float().cpu().numpy()
    # The drawn token's logit and logprob say what all of the row's differ by.
    difference = values.logprobs[:, :1] - found[:, :1]
    return TokenLogprobs(
        np.concatenate([values.token_ids, ids[:, 1:].astype(np.int32)], 1),
        np.concatenate([values.logprobs, found[:, 1:] + difference], 1),
        values.ranks,
    )


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
