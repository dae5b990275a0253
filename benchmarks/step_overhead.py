"""What a step costs besides the model: schedule and commit of Trivet, and of vLLM's scheduler where it is installed.

    python benchmarks/step_overhead.py [--cases 32,256,1024,256+10000,1024+10000] [--steps 250] [--variants steady]

A case is the number of running requests and, after a plus sign, of waiting ones, which find every place taken. All
running requests decode and none ends: prompts of 100 to 500 random tokens, so that each step completes the blocks of
a sixteenth of them. Blocks have 16 tokens, prefix caching is on, nobody observes or detokenises. The engines take turns
in rounds of 25 steps; figures are medians over all steps, in processor time (``time.process_time``), which other
processes disturb less than the clock.

- Trivet: a whole ``Engine.step`` less what the executor took, which stands in for the workers.
- vLLM (0.32): ``Scheduler.schedule`` and ``Scheduler.update_from_output``, and nothing of the engine around them;
  results are made outside the measurement.

Prints a JSON line per case and engine. ``--variants`` names more cases for Trivet alone, whose lines have a key
``variant``: ``evicting`` (the memory is full of cached blocks, every new block takes the place of one), ``hybrid``
(Gemma 3's pattern: five layers with a window of 512 tokens to each that keeps everything, in 6 groups), ``stuck`` (the
first waiting request needs more memory than is free).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

VOCAB, EOS, TOKEN, BLOCK_SIZE = 32_000, 2, 7, 16
SHORTEST, LONGEST = 100, 500
WARM_STEPS, ROUND = 30, 25


@dataclass(frozen=True)
class Case:
    """``steps`` are measured."""

    running: int
    waiting: int
    steps: int
    variant: str = "steady"

    @property
    def max_tokens(self) -> int:
        """So many that nobody ends."""
        return self.steps + WARM_STEPS + 200

    @property
    def max_model_len(self) -> int:
        """The longest prompt and its output."""
        return LONGEST + self.max_tokens

    @property
    def num_blocks(self) -> int:
        """Enough for everything that runs."""
        return 1 + self.running * -(-self.max_model_len // BLOCK_SIZE)

    @property
    def token_budget(self) -> int:
        """Tokens of a step: no limit to those that decode."""
        return max(8192, 2 * self.running)

    def prompts(self) -> Iterator[list[int]]:
        """One per request, running ones first."""
        rng = np.random.default_rng(self.running)
        while True:
            yield rng.integers(0, VOCAB, int(rng.integers(SHORTEST, LONGEST + 1))).tolist()


def trivet_side(case: Case) -> Callable[[], float]:
    """Fill an engine until all requests decode; the function returned makes a step and returns its seconds."""
    from trivet.engine import Engine
    from trivet.plan import StepPlan
    from trivet.roles import PendingStep
    from trivet.simulation import IdTokenizer, SimulatedExecutor, simple_layers
    from trivet_schemas.sampling import SamplingParams

    class Executor(SimulatedExecutor):
        seconds = 0.0

        def submit(self, plan: StepPlan) -> PendingStep:
            start = time.process_time()
            pending = super().submit(plan)
            self.seconds += time.process_time() - start
            return pending

    hybrid, stuck = case.variant == "hybrid", case.variant == "stuck"
    layers = simple_layers(18, num_kv_heads=1, windows=[512] * 5 + [None] if hybrid else [None])
    num_blocks = case.num_blocks * (6 if hybrid else 1)
    max_model_len = (num_blocks - 1) * BLOCK_SIZE if stuck else case.max_model_len
    executor = Executor(layers, vocab_size=VOCAB, max_model_len=max_model_len, available_bytes=1 << 40, tokens=TOKEN)
    plugins = {
        "cache": {"use": "paged", "block_size": BLOCK_SIZE, "num_blocks": num_blocks, "prefix_caching": True},
        "scheduler": {
            "use": "continuous",
            "max_num_seqs": case.running + stuck,
            "max_num_batched_tokens": case.token_budget,
        },
    }
    engine = Engine({"model": "none", "plugins": plugins}, [executor, IdTokenizer(VOCAB, [EOS])])
    prompts = case.prompts()
    if case.variant == "evicting":
        for i in range(num_blocks * BLOCK_SIZE // SHORTEST):
            engine.add_request(f"old{i}", next(prompts), SamplingParams(max_tokens=1, temperature=0))
        while engine.has_work:
            engine.step()
    params = SamplingParams(max_tokens=case.max_tokens, temperature=0)
    for i in range(case.running):
        engine.add_request(f"run{i}", next(prompts), params)
    while (
        engine.table.num_running < case.running
        or (engine.table.num_known <= engine.table.num_prompt)[engine.table.order].any()
    ):
        engine.step()
    if stuck:
        length = engine.parts.cache.stats().free * BLOCK_SIZE + 1
        tokens = np.random.default_rng(0).integers(0, VOCAB, length)
        engine.add_request("head", tokens, SamplingParams(max_tokens=1, temperature=0))
    for i in range(case.waiting):
        engine.add_request(f"wait{i}", next(prompts), params)

    def step() -> float:
        executor.seconds, start = 0.0, time.process_time()
        engine.step()
        seconds = time.process_time() - start - executor.seconds
        assert engine.table.num_running == case.running
        return seconds

    return step


def vllm_side(case: Case) -> Callable[[], float]:
    """The same for vLLM's scheduler, whose model is a configuration file."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": case.max_model_len}
    with TemporaryDirectory() as folder:
        names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        (Path(folder) / "config.json").write_text(json.dumps(names | shape))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=case.max_model_len, dtype="bfloat16")
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = case.num_blocks
        limits = SchedulerConfig(
            max_num_seqs=case.running,
            max_num_batched_tokens=case.token_budget,
            max_model_len=case.max_model_len,
            is_encoder_decoder=False,
        )
        config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=limits)
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    layout = KVCacheConfig(case.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
    hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
    scheduler = Scheduler(config, layout, StructuredOutputManager(config), BLOCK_SIZE)
    prompts = case.prompts()

    def add(name: str) -> None:
        params = SamplingParams(max_tokens=case.max_tokens, temperature=0)
        params.update_from_generation_config({}, EOS)
        scheduler.add_request(Request(name, next(prompts), params, None, block_hasher=hasher))

    def step() -> float:
        start = time.process_time()
        plan = scheduler.schedule()
        seconds = time.process_time() - start
        ids = list(plan.num_scheduled_tokens)
        requests = [scheduler.requests[name] for name in ids]
        tokens = [[TOKEN] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        places = {name: i for i, name in enumerate(ids)}
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)
        start = time.process_time()
        scheduler.update_from_output(plan, result)
        return seconds + time.process_time() - start

    for i in range(case.running):
        add(f"run{i}")
    while len(scheduler.running) < case.running or any(not r.num_output_tokens for r in scheduler.running):
        step()
    for i in range(case.waiting):
        add(f"wait{i}")
    return step


def measure(case: Case, sides: dict[str, Callable[[Case], Callable[[], float]]]) -> None:
    """Let the engines take turns; print their lines."""
    steps = {name: make(case) for name, make in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in steps.values():
        for _ in range(WARM_STEPS):
            step()
    gc.collect()
    for _ in range(-(-case.steps // ROUND)):
        for name, step in steps.items():
            seconds[name] += [step() for _ in range(ROUND)]
    for name, values in seconds.items():
        median = statistics.median(values) * 1e6
        line: dict[str, Any] = {
            "engine": name,
            "running": case.running,
            "waiting": case.waiting,
            "us_per_request_step": round(median / case.running, 3),
            "us_per_step": round(median, 1),
        }
        if case.variant != "steady":
            line["variant"] = case.variant
        print(json.dumps(line), flush=True)


def main() -> None:
    """Run the cases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="32,256,1024,256+10000,1024+10000")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--variants", default="steady")
    parser.add_argument("--engines", default="trivet,vllm")
    args = parser.parse_args()
    sides = {"trivet": trivet_side, "vllm": vllm_side}
    has_vllm = importlib.util.find_spec("vllm") is not None
    engines = [name for name in args.engines.split(",") if name != "vllm" or has_vllm]
    for variant in args.variants.split(","):
        for text in args.cases.split(","):
            running, _, waiting = text.partition("+")
            case = Case(int(running), int(waiting or 0), args.steps, variant)
            measure(case, {name: sides[name] for name in engines if name == "trivet" or variant == "steady"})


if __name__ == "__main__":
    main()
