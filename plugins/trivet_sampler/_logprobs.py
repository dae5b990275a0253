"""Log-probabilities of the raw model, for chosen tokens and the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivet.result import TokenLogprobs
from trivet_kernels import sampling as kernels
from trivet_kernels.transfer import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from trivet.plan import Int32, Int64


@dataclass(slots=True)
class Wanted:
    """A request's logprobs: of the batch's token ``places[i]`` in logits row ``rows[i]``, of the ``k`` most likely
    ones (-1: all), and of the ids ``asked`` for."""

    k: int
    rows: Int64
    places: Int64
    asked: Int32 | None = None


class Logprobs:
    """Logprobs of each item of ``wanted``, NaN where a row of logits has NaN, as they are where the logits are.

    Columns are the token itself, the most likely ones, and those that are asked for. Probabilities are shares of all
    that the model gives logits for; only ids below ``size`` are listed and count for ranks. Tokens need not be known on
    the host: it reads :attr:`tensors` and them at once, and hands the former to :meth:`values`.
    """

    def __init__(self, logits: Tensor, wanted: Sequence[Wanted], tokens: Tensor, size: int) -> None:
        """Compute what is wanted.

        Args:
            logits: ``[L, vocab_size]``, not changed.
            wanted: What to compute; items that want equally many alternatives are computed together.
            tokens: ``[n]`` int64, where the logits are.
            size: Ids that the tokenizer knows.
        """
        self._wanted = wanted
        #: elements of four bytes: ids, values and ranks for each number of alternatives, then logits of asked ids
        self.tensors: list[Tensor] = []
        self._groups: list[list[int]] = []
        for k in sorted({item.k for item in wanted}):
            members = [index for index, item in enumerate(wanted) if item.k == k]
            rows = np.concatenate([wanted[i].rows for i in members])
            places = to_device(np.concatenate([wanted[i].places for i in members]), logits.device)
            self.tensors += kernels.logprobs(logits, rows, tokens[places], size if k < 0 else min(k, size), size)
            self._groups.append(members)
        self.tensors += [
            _logits_of(logits, item.rows, tokens[to_device(item.places, logits.device)], item.asked)
            for item in wanted
            if item.asked is not None
        ]

    def values(self, arrays: Sequence[NDArray[Any]]) -> list[TokenLogprobs]:
        """The logprobs of each item, out of what was in :attr:`tensors`."""
        out: dict[int, TokenLogprobs] = {}
        found = iter(arrays)
        for members in self._groups:
            ids, values, ranks = next(found), next(found), next(found)
            at = 0
            for index in members:
                part = slice(at, at + len(self._wanted[index].rows))
                out[index] = TokenLogprobs(ids[part], values[part], ranks[part])
                at = part.stop
        for index, item in enumerate(self._wanted):
            if item.asked is not None:
                out[index] = _with_asked(out[index], item.asked, next(found))
        return [out[index] for index in range(len(self._wanted))]


def _logits_of(logits: Tensor, rows: Int64, tokens: Tensor, asked: Int32) -> Tensor:
    """Float32 logits ``[n, 1 + a]`` of a row's token and of the ids asked for."""
    others = to_device(asked.astype(np.int64), logits.device)
    ids = torch.cat([tokens[:, None], others.expand(len(rows), -1)], 1)
    return logits[to_device(rows, logits.device)[:, None], ids].float()


def _with_asked(values: TokenLogprobs, asked: Int32, found: NDArray[np.float32]) -> TokenLogprobs:
    # The token's logit and logprob say what all of the row's differ by.
    difference = values.logprobs[:, :1] - found[:, :1]
    return TokenLogprobs(
        np.concatenate([values.token_ids, np.tile(asked, (len(found), 1))], 1),
        np.concatenate([values.logprobs, found[:, 1:] + difference], 1),
        values.ranks,
    )
