"""Scores of pairs of texts: similarity of their embeddings, or what a model with a head for scores says of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.errors import RequestError
from trivet.submission import request_error
from trivet_schemas.errors import ParameterError
from trivet_schemas.outputs import PoolingOutput, PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from trivet_schemas.prompts import parse_prompt

if TYPE_CHECKING:
    from trivet.roles.tokenizer import Tokenizer

Pooled = PoolingRequestOutput[PoolingOutput]


def pair_up(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[int, int]]:
    """Indices of what is scored together: one with each, or each with its counterpart.

    Raises:
        RequestError: If there are none, or the numbers fit neither way.
    """
    if not first or not second or len(first) not in {1, len(second)}:
        raise RequestError(
            f"text_1, text_2: give one and any number, or equally many of both; got {len(first)} and {len(second)}",
            param="text_1",
        )
    return [(0 if len(first) == 1 else index, index) for index in range(len(second))]


def joined_prompt(tokenizer: Tokenizer | None, first: Any, second: Any) -> dict[str, Any]:
    """The prompt that a model reads two texts as.

    Raises:
        RequestError: For what is no prompt, or text without a tokenizer.
    """
    try:
        one, other = parse_prompt(first), parse_prompt(second)
    except ParameterError as exc:
        raise request_error(exc) from None
    if one.token_ids is None and other.token_ids is None and one.text is not None and other.text is not None:
        if tokenizer is None:
            raise RequestError("this engine has no tokenizer; give the texts as token ids", param="text_1")
        return {"prompt_token_ids": tokenizer.encode_pair(one.text, other.text)}
    if one.token_ids is None or other.token_ids is None:
        raise RequestError("text_1, text_2: give both as text or both as token ids", param="text_1")
    return {"prompt_token_ids": [*one.token_ids, *other.token_ids]}


def head_score(output: Pooled) -> ScoringRequestOutput:
    """What a model's head said of a pair; ``nan`` with the error if it failed."""
    data = output.outputs.data
    return ScoringRequestOutput(
        output.request_id,
        ScoringOutput(math.nan if data is None else float(data[0])),
        output.prompt_token_ids,
        output.finished,
        output.num_cached_tokens,
        output.metrics,
        output.error,
    )


def cosine_score(first: Pooled, second: Pooled) -> ScoringRequestOutput:
    """The cosine of two embeddings, from -1 to 1; ``nan`` with the error if one of them failed."""
    a, b = first.outputs.data, second.outputs.data
    score = math.nan
    if a is not None and b is not None:
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        length = float(np.linalg.norm(x) * np.linalg.norm(y))
        score = float(x @ y) / length if length else 0.0
    return ScoringRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(score),
        [*first.prompt_token_ids, *second.prompt_token_ids],
        True,
        first.num_cached_tokens + second.num_cached_tokens,
        None,
        first.error or second.error,
    )
