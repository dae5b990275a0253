"""Logprobs as users get them: per position a mapping from token id to logprob, rank and text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trivet_schemas.outputs import Logprob

if TYPE_CHECKING:
    from trivet.result import TokenLogprobs

TokenText = Callable[[int], str]


def position_logprobs(
    values: TokenLogprobs, count: int, text: TokenText | None, num_asked: int = 0
) -> list[dict[int, Logprob]]:
    """The first ``count`` positions of ``values``: the drawn token first, then the most likely ones by rank.

    Args:
        values: ``[n, 1 + k]`` ids and logprobs, ``[n]`` ranks, see :class:`trivet.result.TokenLogprobs`.
        count: Positions wanted, at most ``n``.
        text: Gives a token's text; None leaves ``decoded_token`` empty.
        num_asked: So many of the last columns are of tokens that were asked for by id, whose rank is not known.
    """
    ranked = values.token_ids.shape[1] - num_asked
    ids = values.token_ids[:count].tolist()
    logprobs = values.logprobs[:count].tolist()
    ranks = values.ranks[:count].tolist()
    positions: list[dict[int, Logprob]] = []
    for row_ids, row_logprobs, rank in zip(ids, logprobs, ranks, strict=True):
        found: dict[int, Logprob] = {}
        for place, (token, logprob) in enumerate(zip(row_ids, row_logprobs, strict=True)):
            if token not in found:  # the drawn token is usually one of the most likely, too
                known = rank if place == 0 else place if place < ranked else None
                found[token] = Logprob(logprob, known, None if text is None else text(token))
        positions.append(found)
    return positions
