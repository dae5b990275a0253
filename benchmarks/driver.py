"""An engine in a process of its own that runs what another process tells it; prefix.py and sessions.py start it.

    python benchmarks/driver.py CONFIG < WORK

Benchmarks that compare configurations let several of them take turns, the others idle, because only ratios taken in one
go count on a machine that drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from workloads import Work


@dataclass(frozen=True, slots=True)
class Run:
    """What came of some work: seconds, and per request the tokens and how many of its prompt's were found."""

    seconds: float
    cpu_seconds: float  #: of the engine's process
    last_first_token: float  #: seconds until every request had its first token
    outputs: list[list[int]]
    cached: list[int]
    tier_hits: int  #: tokens found in cache tiers
    evicted: int  #: blocks
    preemptions: int

    def computed(self, work: Work) -> int:
        """Prompt tokens that were computed."""
        return sum(len(prompt) for prompt, _ in work) - sum(self.cached)


class Engine:
    """The process, from this side. ``config`` is a configuration like the YAML file's."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        environment = {"HF_HUB_OFFLINE": "1"} | os.environ
        command = [sys.executable, __file__, json.dumps(config)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.startup = float(self._answer()["startup_s"])

    def run(self, work: Work) -> Run:
        """Run requests together, greedily and with the end of sequence ignored."""
        print(json.dumps(work), file=self._process.stdin, flush=True)
        return Run(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with code {self._process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Shut the engine down and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(config: Mapping[str, Any]) -> None:
    """The process, from within: one line of work in, one line of figures out."""
    from trivet import LLM, SamplingParams

    start = time.perf_counter()
    with LLM.from_config(config) as llm:
        stats = llm.engine.parts.cache.stats
        print(json.dumps({"startup_s": round(time.perf_counter() - start, 2)}), flush=True)
        for line in sys.stdin:
            work: Work = [(prompt, count) for prompt, count in json.loads(line)]
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in work]
            before, begin, cpu = stats(), time.monotonic(), time.process_time()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
            seconds, after = time.monotonic() - begin, stats()
            metrics = [output.metrics for output in outputs]
            first = max(m.first_token_time for m in metrics if m is not None and m.first_token_time is not None)
            figures = {
                "seconds": seconds,
                "cpu_seconds": time.process_time() - cpu,
                "last_first_token": first - begin,
                "outputs": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "tier_hits": after.tier_hits - before.tier_hits,
                "evicted": after.evicted - before.evicted,
                "preemptions": sum(m.num_preemptions for m in metrics if m is not None),
            }
            print(json.dumps(figures), flush=True)


def main() -> None:
    """Serve what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=_mapping, help="a configuration like the YAML file's, in JSON")
    parser.epilog = (
        "Work is read from stdin, a line of JSON each: [[PROMPT_TOKEN_IDS, OUTPUT_TOKENS], ...]. A line of JSON with "
        "what came of it is printed for each."
    )
    serve(parser.parse_args().config)


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


if __name__ == "__main__":
    main()
