"""A preemption storm: memory for hardly more than one request, and many that want to run. How much is computed again?

    python benchmarks/storm.py [--requests 64] [--pool 1.2] [--victims newest,least_computed] [--seeds 5]

Requests have prompts of 8 to 256 tokens and outputs of 8 to 256 tokens, drawn at random; the pool holds ``--pool``
times the longest of them. Engines run the real scheduler, cache and bookkeeping without a model (every step ends at
once), so all counts are exact and the same in every run. Prints a JSON line per case:

- ``recomputed_share``: tokens computed again after preemptions, over all tokens that were computed;
- ``preemptions`` in all and ``most_preemptions`` of one request;
- ``steps`` until all have ended, and ``running`` requests per step.

Prefix caching finds what a preempted request computed as long as nobody else has taken its blocks; ``--prefix-caching``
turns it on. ``max_recomputed_share`` of the scheduler is 1 unless ``--share`` says otherwise, so that victims can be
compared; with less, the share is held by admitting fewer requests at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

VOCAB, BLOCK_SIZE, SHORTEST, LONGEST = 32_000, 8, 8, 256


@dataclass(frozen=True)
class Storm:
    """What came of one storm."""

    victim: str
    seed: int
    requests: int
    finished: int
    steps: int
    running: float
    preemptions: int
    most_preemptions: int
    computed: int
    recomputed: int

    @property
    def recomputed_share(self) -> float:
        """Of all computed tokens."""
        return self.recomputed / self.computed


def lengths(requests: int, seed: int, longest: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request."""
    rng = np.random.default_rng(seed)
    drawn: list[list[int]] = rng.integers(SHORTEST, longest + 1, (requests, 2)).tolist()
    return [(prompt, output) for prompt, output in drawn]


def run_storm(
    victim: str = "newest",
    *,
    seed: int = 0,
    requests: int = 64,
    pool: float = 1.2,
    longest: int = LONGEST,
    prefix_caching: bool = False,
    max_steps: int = 200_000,
    **options: Any,
) -> Storm:
    """Run all requests to their end.

    Args:
        victim: Name of a ``victim_policy``.
        seed: Of the lengths and the prompts.
        requests: How many there are from the start.
        pool: Memory, as a multiple of what the longest request needs.
        longest: Tokens of a prompt, and of an output, at most.
        prefix_caching: Whether blocks of preempted requests can be found again.
        max_steps: After so many steps the storm is given up, and what has not finished is not counted as finished.
        options: Further options of the scheduler.
    """
    from trivet.engine import Engine
    from trivet.simulation import IdTokenizer, SimulatedExecutor, simple_layers
    from trivet_schemas.sampling import SamplingParams

    work = lengths(requests, seed, longest)
    most = max(prompt + output for prompt, output in work)
    blocks = 1 + int(pool * -(-most // BLOCK_SIZE))
    executor = SimulatedExecutor(
        simple_layers(1, num_kv_heads=1, head_dim=8), vocab_size=VOCAB, max_model_len=most, available_bytes=1 << 30
    )
    plugins = {
        "cache": {"use": "paged", "block_size": BLOCK_SIZE, "num_blocks": blocks, "prefix_caching": prefix_caching},
        "scheduler": {"use": "continuous", "victim": victim, **options},
    }
    engine = Engine({"model": "none", "plugins": plugins}, [executor, IdTokenizer(VOCAB)])
    rng = np.random.default_rng(seed + 1)
    for number, (prompt, output) in enumerate(work):
        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        engine.add_request(str(number), rng.integers(0, VOCAB, prompt).tolist(), params)
    ended: list[Any] = []
    steps = running = 0
    try:
        while engine.has_work and steps < max_steps:
            ended += [end.request for end in engine.step().finished]
            running += engine.table.num_running
            steps += 1
    finally:
        engine.shutdown()
    recomputed = sum(request.num_recomputed_tokens for request in ended)
    # The last token of an output is never computed.
    useful = sum(r.num_prompt + len(r.output_ids) - 1 for r in ended)
    return Storm(
        victim=victim,
        seed=seed,
        requests=requests,
        finished=sum(request.finish_reason == "length" for request in ended),
        steps=steps,
        running=round(running / max(steps, 1), 2),
        preemptions=sum(request.num_preemptions for request in ended),
        most_preemptions=max(request.num_preemptions for request in ended),
        computed=useful + recomputed,
        recomputed=recomputed,
    )


def cases(args: argparse.Namespace) -> Iterator[Storm]:
    """One storm after the other."""
    for victim in args.victims.split(","):
        for seed in range(args.seeds):
            yield run_storm(
                victim,
                seed=seed,
                requests=args.requests,
                pool=args.pool,
                prefix_caching=args.prefix_caching,
                max_recomputed_share=args.share,
            )


def main() -> None:
    """Run the cases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--pool", type=float, default=1.2)
    parser.add_argument("--victims", default="newest,least_computed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--prefix-caching", action="store_true")
    args = parser.parse_args()
    found = list(cases(args))
    for storm in found:
        print(json.dumps(asdict(storm) | {"recomputed_share": round(storm.recomputed_share, 4)}), flush=True)
    for victim in args.victims.split(","):
        own = [storm for storm in found if storm.victim == victim]
        computed, recomputed = sum(s.computed for s in own), sum(s.recomputed for s in own)
        line = {"victim": victim, "seeds": len(own), "recomputed_share": round(recomputed / computed, 4)}
        print(json.dumps(line | {"steps": sum(s.steps for s in own)}), flush=True)


if __name__ == "__main__":
    main()
