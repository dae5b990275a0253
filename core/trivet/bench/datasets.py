"""Requests that benchmarks run: random tokens, or conversations from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.errors import TrivetError

if TYPE_CHECKING:
    from trivet.engine import Engine
    from trivet.plan import Int32
    from trivet.roles.tokenizer import Tokenizer

# Which conversations are of use, in tokens: no empty turns, and nothing that would run for minutes. These are vLLM's
# limits, so that figures compare.
_SHORTEST_TURN, _LONGEST_PROMPT, _LONGEST_TOTAL = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt as token ids, and the number of tokens to generate."""

    prompt_token_ids: list[int]
    output_len: int


def plain_token_ids(engine: Engine) -> Int32:
    """``[n]`` ids that a random prompt may hold: those of the vocabulary that begin or end nothing."""
    tokenizer = engine.tokenizer
    special = set(engine.model.eos_token_ids)
    if tokenizer is not None:
        special |= set(tokenizer.eos_token_ids)
        if tokenizer.bos_token_id is not None:
            special.add(tokenizer.bos_token_id)
    ids: Int32 = np.setdiff1d(np.arange(engine.parts.vocab_size, dtype=np.int32), np.array(sorted(special), np.int32))
    return ids


def random_requests(
    count: int,
    token_ids: Int32,
    *,
    input_len: int,
    output_len: int,
    range_ratio: tuple[float, float] = (0.0, 0.0),
    prefix_len: int = 0,
    seed: int = 0,
) -> list[BenchRequest]:
    """Requests of random tokens.

    Args:
        count: Requests.
        token_ids: ``[n]`` ids to draw from.
        input_len: Tokens of a prompt after its prefix.
        output_len: Tokens to generate.
        range_ratio: For prompts and outputs: lengths are drawn from ``len * (1 - ratio)`` to ``len * (1 + ratio)``,
            both included and at least 1.
        prefix_len: Tokens that every prompt begins with, the same for all.
        seed: Of everything that is drawn.
    """
    rng = np.random.default_rng(seed)
    inputs = _lengths(rng, count, input_len, range_ratio[0])
    outputs = _lengths(rng, count, output_len, range_ratio[1])
    prefix = rng.choice(token_ids, prefix_len).tolist()
    return [
        BenchRequest(prefix + rng.choice(token_ids, length).tolist(), output)
        for length, output in zip(inputs, outputs, strict=True)
    ]


def prefix_repetition_requests(
    count: int,
    token_ids: Int32,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    seed: int = 0,
) -> list[BenchRequest]:
    """Requests of random tokens in random order, of which as many share each of some prefixes.

    Args:
        count: Requests; what ``num_prefixes`` does not divide is left out, as in vLLM.
        token_ids: ``[n]`` ids to draw from.
        prefix_len: Tokens of a prefix.
        suffix_len: Tokens of a prompt after its prefix.
        num_prefixes: Prefixes, at most ``count``.
        output_len: Tokens to generate.
        seed: Of everything that is drawn.
    """
    rng = np.random.default_rng(seed)
    prefixes = [rng.choice(token_ids, prefix_len).tolist() for _ in range(num_prefixes)]
    requests = [
        BenchRequest(prefix + rng.choice(token_ids, suffix_len).tolist(), output_len)
        for prefix in prefixes
        for _ in range(count // num_prefixes)
    ]
    return [requests[index] for index in rng.permutation(len(requests)).tolist()]


def _lengths(rng: np.random.Generator, count: int, mean: int, ratio: float) -> list[int]:
    low, high = shortest(mean, ratio), max(math.ceil(mean * (1 + ratio)), 1)
    lengths: list[int] = rng.integers(low, high, count, endpoint=True).tolist()
    return lengths


def shortest(mean: int, ratio: float = 0.0) -> int:
    """The shortest of random lengths."""
    return max(math.floor(mean * (1 - ratio)), 1)


def sharegpt_requests(
    path: Path,
    count: int,
    tokenizer: Tokenizer,
    *,
    output_len: int | None = None,
    max_model_len: int = _LONGEST_TOTAL,
    seed: int = 0,
    oversample: bool = True,
) -> list[BenchRequest]:
    """The first turns of conversations, in random order: what a human asked, and as many tokens as the answer has.

    Conversations are passed over whose prompt or answer is shorter than 4 tokens, whose prompt is longer than 1024, or
    which have more than 2048 or ``max_model_len`` tokens together.

    Args:
        path: A JSON list of ``{"conversations": [{"value": TEXT}, {"value": TEXT}, ...]}``, as ShareGPT's files are.
        count: Requests.
        tokenizer: Makes and counts tokens.
        output_len: Tokens to generate in place of the answer's; then short answers are no reason to pass over.
        max_model_len: Longest request, prompt and output together.
        seed: Of the order.
        oversample: Repeat conversations when the file has fewer than ``count``; False: then there are fewer requests.

    Raises:
        TrivetError: The file cannot be read, has another shape, or holds no conversation of use.
    """
    turns = [entry for entry in _read(path) if len(entry) >= 2]
    order = np.random.default_rng(seed).permutation(len(turns)).tolist()
    longest = min(_LONGEST_TOTAL, max_model_len)
    requests: list[BenchRequest] = []
    for prompt, answer in (turns[index][:2] for index in order):
        if len(requests) == count:
            break
        ids = tokenizer.encode(prompt)
        wanted = len(tokenizer.encode(answer, add_special_tokens=False)) if output_len is None else output_len
        short = len(ids) < _SHORTEST_TURN or (output_len is None and wanted < _SHORTEST_TURN)
        if not short and len(ids) <= _LONGEST_PROMPT and len(ids) + wanted <= longest:
            requests.append(BenchRequest(list(ids), wanted))
    if not requests:
        raise TrivetError(
            f"--dataset-path: {path} has no conversation with two turns of at least {_SHORTEST_TURN} tokens and at "
            f"most {longest} together; name another file, or raise --max-model-len"
        )
    if oversample:
        requests = [requests[i % len(requests)] for i in range(count)]
    return requests


def _read(path: Path) -> list[list[str]]:
    """The texts of every conversation."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrivetError(f"--dataset-path: {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TrivetError(f"--dataset-path: {path} is no JSON: {error}") from error
    try:
        return [[_text(turn["value"]) for turn in entry.get("conversations", [])] for entry in content]
    except (TypeError, KeyError, AttributeError) as error:
        raise TrivetError(
            f'--dataset-path: {path} must hold a list like [{{"conversations": [{{"value": "question"}}, '
            f'{{"value": "answer"}}]}}], as ShareGPT\'s files do'
        ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def check_lengths(requests: Iterable[BenchRequest], max_model_len: int, options: Sequence[str]) -> None:
    """Raise TrivetError when a request is longer than the engine takes; ``options`` are what set the lengths."""
    longest = max(requests, key=lambda request: len(request.prompt_token_ids) + request.output_len)
    check_length(len(longest.prompt_token_ids), longest.output_len, max_model_len, options)


def check_length(prompt: int, output: int, max_model_len: int, options: Sequence[str]) -> None:
    """:func:`check_lengths` of one request, which need not have been made: the shortest one, before all are."""
    if prompt + output > max_model_len:
        raise TrivetError(
            f"{' and '.join(options)}: a prompt of {prompt} tokens and {output} to generate are {prompt + output} "
            f"together, more than the {max_model_len} that the engine takes; lower them, or raise --max-model-len as "
            "far as model and memory allow"
        )
