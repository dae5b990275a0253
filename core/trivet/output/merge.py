"""Joining outputs that a slow consumer has not taken yet."""

from __future__ import annotations

from dataclasses import replace

from trivet.output.stage import Output
from trivet_schemas.outputs import CompletionOutput, RequestOutput
from trivet_schemas.sampling import RequestOutputKind


def merge_outputs(waiting: Output, newer: Output, kind: RequestOutputKind) -> Output:
    """One output that says what ``waiting`` and then ``newer`` say; neither is changed.

    Deltas are joined per index; of cumulative outputs the newer one says everything.
    """
    if (
        kind is not RequestOutputKind.DELTA
        or not isinstance(waiting, RequestOutput)
        or not isinstance(newer, RequestOutput)
    ):
        return newer
    joined = {output.index: output for output in waiting.outputs}
    for output in newer.outputs:
        earlier = joined.get(output.index)
        joined[output.index] = output if earlier is None else _join(earlier, output)
    prompt_logprobs = waiting.prompt_logprobs if newer.prompt_logprobs is None else newer.prompt_logprobs
    return replace(newer, outputs=[joined[index] for index in sorted(joined)], prompt_logprobs=prompt_logprobs)


def _join(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs = None if later.logprobs is None else (earlier.logprobs or []) + later.logprobs
    return replace(
        later, text=earlier.text + later.text, token_ids=earlier.token_ids + later.token_ids, logprobs=logprobs
    )
