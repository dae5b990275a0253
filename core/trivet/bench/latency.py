"""How long one batch takes from its arrival to its last token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from trivet.bench.datasets import check_length, plain_token_ids, random_requests
from trivet.bench.runs import run_requests, search_beams

if TYPE_CHECKING:
    from trivet.llm import LLM


def measure_latency(
    llm: LLM,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_iters_warmup: int = 0,
    n: int = 1,
    beam_search: bool = False,
    detokenize: bool = True,
    seed: int = 0,
    on_iteration: Callable[[], None] | None = None,
) -> list[float]:
    """Run a batch of random prompts again and again.

    Every iteration has prompts of its own, so that a prefix cache finds nothing of an earlier one.

    Args:
        llm: An engine that does nothing else.
        input_len: Tokens per prompt.
        output_len: Tokens per output.
        batch_size: Prompts per iteration.
        num_iters: Iterations that are measured.
        num_iters_warmup: Iterations before these.
        n: Outputs per prompt, or beams.
        beam_search: Search for the likeliest outputs instead of sampling.
        detokenize: Make text of the tokens; what a search finds always becomes text.
        seed: Of the prompts.
        on_iteration: Called after every iteration.

    Returns:
        ``num_iters`` durations in seconds.

    Raises:
        TrivetError: The lengths are more than the engine takes, or a request failed.
    """
    check_length(input_len, output_len, llm.engine.max_model_len, ("--input-len", "--output-len"))
    ids = plain_token_ids(llm.engine)
    seconds = []
    for iteration in range(num_iters_warmup + num_iters):
        batch = random_requests(
            batch_size, ids, input_len=input_len, output_len=output_len, seed=seed * 1_000_003 + iteration
        )
        start = time.perf_counter()
        if beam_search:
            search_beams(llm, batch, width=n)
        else:
            run_requests(llm, batch, n=n, detokenize=detokenize)
        seconds.append(time.perf_counter() - start)
        if on_iteration is not None:
            on_iteration()
    return seconds[num_iters_warmup:]
