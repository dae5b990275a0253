"""Joining outputs that a slow consumer has not taken yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from trivet.output.stage import Output
from trivet_schemas.outputs import CompletionOutput, RequestOutput
from trivet_schemas.sampling import RequestOutputKind


def merge_outputs(outputs: Sequence[Output], kind: RequestOutputKind) -> Output:
    """One output that says what ``outputs`` (at least one) say in their order; none of them is changed.

    Deltas are joined per index, in time proportional to what they hold; of cumulative outputs the newest one says
    everything.
    """
    newest = outputs[-1]
    if kind is not RequestOutputKind.DELTA or len(outputs) == 1 or not isinstance(newest, RequestOutput):
        return newest
    parts: dict[int, list[CompletionOutput]] = {}
    prompt_logprobs = None
    for output in outputs:
        if isinstance(output, RequestOutput):
            prompt_logprobs = prompt_logprobs if output.prompt_logprobs is None else output.prompt_logprobs
            for part in output.outputs:
                parts.setdefault(part.index, []).append(part)
    joined = [_join(parts[index]) for index in sorted(parts)]
    return replace(newest, outputs=joined, prompt_logprobs=prompt_logprobs)


def _join(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    logprobs = None if last.logprobs is None else list(chain.from_iterable(part.logprobs or () for part in parts))
    return replace(
        last,
        text="".join(part.text for part in parts),
        token_ids=list(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=logprobs,
    )
