"""How many requests and tokens per second an engine does when everything is there from the beginning."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trivet.bench.runs import run_requests

if TYPE_CHECKING:
    from trivet.bench.datasets import BenchRequest
    from trivet.bench.runs import Subject


@dataclass(frozen=True, slots=True)
class Throughput:
    """Seconds and counts. A prompt counts once, however many outputs it has."""

    elapsed_time: float
    num_requests: int
    total_prompt_tokens: int
    total_output_tokens: int

    @property
    def total_num_tokens(self) -> int:
        """Of prompts and outputs."""
        return self.total_prompt_tokens + self.total_output_tokens

    def as_json(self) -> dict[str, float]:
        """The keys of vLLM's ``bench throughput``, and what it only prints."""
        return {
            "elapsed_time": self.elapsed_time,
            "num_requests": self.num_requests,
            "total_num_tokens": self.total_num_tokens,
            "requests_per_second": self.num_requests / self.elapsed_time,
            "tokens_per_second": self.total_num_tokens / self.elapsed_time,
            "total_prompt_tokens": self.total_prompt_tokens,
            "total_output_tokens": self.total_output_tokens,
            "output_tokens_per_second": self.total_output_tokens / self.elapsed_time,
        }


def measure_throughput(
    llm: Subject,
    requests: Sequence[BenchRequest],
    *,
    n: int = 1,
    detokenize: bool = True,
    on_ended: Callable[[], None] | None = None,
) -> Throughput:
    """Run all requests at once; see :func:`trivet.bench.runs.run_requests`, also for what is raised."""
    start = time.perf_counter()
    outputs = run_requests(llm, requests, n=n, detokenize=detokenize, on_ended=on_ended)
    seconds = time.perf_counter() - start
    return Throughput(
        seconds,
        len(outputs),
        sum(len(request.prompt_token_ids) for request in requests),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
    )
