"""What requests do to their logits before the temperature, in plain PyTorch: biases and penalties of sparse tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SparseTokens(NamedTuple):
    """Some tokens of some rows: those of row ``rows[i]`` are ``ids[offsets[i] : offsets[i + 1]]``, none twice.

    ``rows`` ``[m]`` int64, none twice; ``offsets`` ``[m + 1]`` int32, 0 first; ``ids`` ``[t]`` int32; ``most`` is an
    upper bound of the tokens of one row, known on the host.
    """

    rows: Tensor
    offsets: Tensor
    ids: Tensor
    most: int


def add_bias(logits: Tensor, tokens: SparseTokens, bias: Tensor) -> None:
    """Add ``bias`` ``[t]`` float32 to the logits ``[n, vocab_size]`` float32 of ``tokens``, in place."""
    row, ids = _places(tokens)
    logits[row, ids] += bias


def apply_penalties(
    logits: Tensor, tokens: SparseTokens, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Make tokens that were seen less likely, in place: the repetition penalty, then frequency, then presence.

    Positive logits are divided by the repetition penalty and others multiplied (Keskar et al., "CTRL", 2019). The
    frequency penalty is subtracted as often as a token is in the output, the presence penalty once if it is.

    Args:
        logits: ``[n, vocab_size]`` float32.
        tokens: Those in the prompt or the output.
        counts: ``[t]`` int32, how often each is in the output; 0 for those of the prompt only.
        repetition: ``[m]`` float32, for each of ``tokens.rows``; 1 changes nothing.
        frequency: ``[m]`` float32.
        presence: ``[m]`` float32.
    """
    row, ids = _places(tokens)
    index = torch.repeat_interleave(torch.arange(len(tokens.rows), device=row.device), tokens.offsets.diff())
    values = logits[row, ids]
    values = torch.where(values > 0, values / repetition[index], values * repetition[index])
    values = values - frequency[index] * counts
    logits[row, ids] = values - presence[index] * (counts > 0)


def _places(tokens: SparseTokens) -> tuple[Tensor, Tensor]:
    return torch.repeat_interleave(tokens.rows, tokens.offsets.diff()), tokens.ids.long()
