"""What a request's parameters mean, one row at a time, in float64, in the documented order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trivet_kernels.reference.noise import gumbel_noise
from trivet_schemas.sampling import SamplingParams

Values = NDArray[np.float64]


@dataclass
class Case:
    """A request: its parameters, and the tokens it has."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    seed: int = 0
    stop_ids: list[int] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)
    before: Any = 0.0  #: what a processor that changes the argmax adds
    after: Any = 0.0  #: what one that keeps it adds


def changed(case: Case, logits: Values, drafts: Sequence[int] = (), bits: NDArray[np.bool_] | None = None) -> Values:
    """Logits ``[n]`` of all known ids as they are before the cuts; ``drafts`` are on the way to the row."""
    params, output = case.params, [*case.output, *drafts]
    values = logits.astype(np.float64)
    if bits is not None:
        values[~bits] = -math.inf
    if params.allowed_token_ids is not None:
        values[np.setdiff1d(np.arange(len(values)), params.allowed_token_ids)] = -math.inf
    for *start, last in case.words:
        if output[len(output) - len(start) :] == start and len(start) <= len(output):
            values[last] = -math.inf
    if len(output) < params.min_tokens:
        values[case.stop_ids] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        if token < len(values):
            values[token] += np.float32(bias)
    for token in {*case.prompt, *output}:
        value = values[token]
        repetition = float(np.float32(params.repetition_penalty))
        values[token] = value / repetition if value > 0 else value * repetition
    for token, count in Counter(output).items():
        values[token] -= np.float32(params.frequency_penalty) * count + np.float32(params.presence_penalty)
    values = values + case.before
    if not is_greedy(params):
        values = values / float(np.float32(params.temperature)) + case.after
    return values


def is_greedy(params: SamplingParams) -> bool:
    """Whether only the likeliest token survives."""
    return params.greedy or params.top_k == 1 or params.min_p >= 1


def probabilities(params: SamplingParams, values: Values, slack: float = 0.0) -> Values:
    """Probabilities ``[n]`` after the cuts; ``slack`` widens those that depend on rounding."""
    order = np.lexsort((np.arange(len(values)), -values))
    order = order[values[order] > -math.inf]
    if is_greedy(params):
        order = order[:1]
    if params.min_p > 0:
        order = order[values[order] >= values[order[0]] + min(0.0, math.log(params.min_p) - slack)]
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = np.exp(values[order] - values[order[0]])
    if params.top_p < 1:
        share = params.top_p * (1 + slack) * weights.sum()
        kept = np.concatenate([[0.0], weights.cumsum()[:-1]]) < share
        kept[0] = True
        order, weights = order[kept], weights[kept]
    found = np.zeros(len(values))
    found[order] = weights / weights.sum()
    return found


def draw(case: Case, values: Values, position: int, slack: float = 0.0) -> int:
    """The token of a row at an output position."""
    ids = torch.from_numpy(np.flatnonzero(probabilities(case.params, values, slack)))
    noise = gumbel_noise(torch.full_like(ids, case.seed), torch.full_like(ids, position), ids).numpy()
    return int(ids[(values[ids.numpy()] + noise).argmax()])


def draws(case: Case, values: Values, position: int) -> set[int]:
    """The token, or where rounding decides about the last one that the cuts leave, those that it may be."""
    return {draw(case, values, position, slack) for slack in (-3e-6, 0.0, 3e-6)}


def chi_square_limit(degrees: int) -> float:
    """What a chi-square statistic exceeds once in 10,000 times (Wilson and Hilferty's approximation)."""
    share = 2 / (9 * degrees)
    return degrees * (1 - share + 3.719 * math.sqrt(share)) ** 3


def assert_follows(drawn: NDArray[np.integer[Any]], expected: Values) -> None:
    """Draws have given probabilities: nothing else is drawn, and a chi-square test passes."""
    observed = np.bincount(drawn, minlength=len(expected)).astype(np.float64)
    assert observed[expected == 0].sum() == 0
    wanted = expected * len(drawn)
    order = np.argsort(-wanted)
    order = order[wanted[order] > 0]
    # Cells that few draws fall into count together.
    many = int((wanted[order] >= 10).sum())
    cells = [(observed[i], wanted[i]) for i in order[:many]]
    if many < len(order):
        cells.append((observed[order[many:]].sum(), wanted[order[many:]].sum()))
    if cells[-1][1] < 10:
        (last, few), (count, expectation) = cells.pop(), cells.pop()
        cells.append((count + last, expectation + few))
    statistic = sum((count - expectation) ** 2 / expectation for count, expectation in cells)
    assert statistic < chi_square_limit(max(1, len(cells) - 1)), (statistic, len(cells))
