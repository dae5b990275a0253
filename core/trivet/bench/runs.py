"""What benchmarks of speed share: running requests, and how figures are summarised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trivet.errors import TrivetError

if TYPE_CHECKING:
    from trivet.bench.datasets import BenchRequest
    from trivet.engine import Engine
    from trivet.llm import LLM
    from trivet.roles.tokenizer import Tokenizer
    from trivet_schemas.outputs import BeamSearchOutput, RequestOutput

PERCENTILES = (10, 25, 50, 75, 90, 99)
"""Those that vLLM's benchmarks report."""


class BenchmarkFailedError(TrivetError):
    """Something failed while it was measured."""

    exit_code = 1


class Subject(Protocol):
    """What is measured: :class:`~trivet.LLM`, or :class:`~trivet.bench.streams.Streams`."""

    @property
    def engine(self) -> Engine:
        """The engine, which does nothing else."""

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer."""

    def generate(self, prompts: Any, params: Any, /, *, use_tqdm: Any) -> list[RequestOutput]:
        """Run requests together; see :meth:`trivet.LLM.generate`."""


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """``{"10": ..., "99": ...}``, linearly interpolated; the keys are text as they are in JSON."""
    found = np.percentile(np.asarray(values, np.float64), PERCENTILES).tolist()
    return {str(percent): value for percent, value in zip(PERCENTILES, found, strict=True)}


class Counter:
    """Has the shape of a ``tqdm`` bar, and tells ``on_ended`` of every request that has ended."""

    def __init__(self, on_ended: Callable[[], None]) -> None:
        self._on_ended = on_ended

    def update(self, count: int) -> None:
        """``count`` more have ended."""
        for _ in range(count):
            self._on_ended()

    def close(self) -> None:
        """Nothing to do: whoever shows it ends it."""


def run_requests(
    llm: Subject,
    requests: Sequence[BenchRequest],
    *,
    n: int = 1,
    detokenize: bool = True,
    on_ended: Callable[[], None] | None = None,
) -> list[RequestOutput]:
    """Run requests together, with the end of sequence ignored and plain sampling (temperature 1), as vLLM's benchmarks
    do.

    Args:
        llm: An engine that does nothing else.
        requests: What to run.
        n: Outputs per request.
        detokenize: Make text of the tokens, as a user would want it.
        on_ended: Called for every request that has ended.

    Raises:
        BenchmarkFailedError: A request failed.
    """
    from trivet_schemas.sampling import SamplingParams

    params = [
        SamplingParams(n=n, temperature=1.0, max_tokens=request.output_len, ignore_eos=True, detokenize=detokenize)
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]

    def make_bar(**_: object) -> Counter:
        assert on_ended is not None
        return Counter(on_ended)

    outputs = llm.generate(prompts, params, use_tqdm=make_bar if on_ended is not None else False)
    _check([output.error for output in outputs])
    return outputs


def search_beams(llm: LLM, requests: Sequence[BenchRequest], *, width: int) -> list[BeamSearchOutput]:
    """Search for the likeliest outputs of requests of the same length, with the end of sequence ignored.

    Args:
        llm: An engine that does nothing else.
        requests: What to run, at once.
        width: Beams per request.

    Raises:
        BenchmarkFailedError: A search failed.
    """
    from trivet_schemas.sampling import BeamSearchParams

    (output_len,) = {request.output_len for request in requests}
    params = BeamSearchParams(beam_width=width, max_tokens=output_len, ignore_eos=True)
    outputs = llm.beam_search([request.prompt_token_ids for request in requests], params)
    _check([output.error for output in outputs])
    return outputs


def _check(errors: Sequence[str | None]) -> None:
    failed = [error for error in errors if error is not None]
    if failed:
        raise BenchmarkFailedError(f"{len(failed)} of {len(errors)} requests failed; the first: {failed[0]}")
