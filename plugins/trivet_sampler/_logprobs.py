"""Log-probabilities of the raw model, for chosen tokens and the most likely ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trivet.result import TokenLogprobs
from trivet_kernels import sampling as kernels

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.plan import Int32, Int64


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
        rows = np.concatenate([wanted[i].rows for i in members])
        tokens = np.concatenate([wanted[i].tokens for i in members])
        ids, values, ranks = kernels.logprobs(logits, rows, tokens, size if k < 0 else min(k, size), size)
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
