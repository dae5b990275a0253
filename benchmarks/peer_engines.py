"""The engines of ``peers.py``, each in a process of its own that runs what it is told: ``ENGINE SETTINGS``.

Any Python that holds the engine runs this file; it needs nothing else of this repository. It reads one line of work at
a time, a JSON list of ``[prompt token ids, tokens to generate]``, and answers with a line of figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = "list[tuple[list[int], int]]"
Runner = Callable[[Any], "list[int]"]
"""Runs requests together, and returns how many tokens each one's output has."""

_MAX_MODEL_LEN, _MAX_NUM_SEQS, _CACHE_GIB = 4096, 64, 2
_SAMPLING = {"temperature": 0.8, "top_p": 0.95}


def trivet(settings: dict[str, Any]) -> Runner:
    """This repository's engine."""
    from trivet import LLM, SamplingParams

    quantization = settings.get("quantization")
    options = dict(settings["options"]) | ({} if quantization is None else {"quantization": quantization})
    return _llm_api(LLM, SamplingParams, settings, {name: _plain(value) for name, value in options.items()})


def vllm(settings: dict[str, Any]) -> Runner:
    """vLLM, with the same calls."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_CACHE_GIB))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    return _llm_api(LLM, SamplingParams, settings, {})


def _plain(value: Any) -> Any:
    """A value as the command line gave it: JSON where it is that, else text."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


def _llm_api(llm_class: Any, params_class: Any, settings: dict[str, Any], options: dict[str, Any]) -> Runner:
    llm = llm_class(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=_MAX_NUM_SEQS,
        enable_prefix_caching=settings["prefix_caching"],
        **options,
    )
    sampling = _SAMPLING if settings["top_p"] else {"temperature": 0.0}

    def run(work: Any) -> list[int]:
        params = [params_class(max_tokens=n, ignore_eos=True, detokenize=False, **sampling) for _, n in work]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


def openvino(settings: dict[str, Any]) -> Runner:
    """OpenVINO GenAI's continuous batching."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    config = genai.SchedulerConfig()
    config.cache_size, config.max_num_batched_tokens, config.max_num_seqs = _CACHE_GIB, 2048, _MAX_NUM_SEQS
    config.enable_prefix_caching, config.dynamic_split_fuse = settings["prefix_caching"], True
    pipeline = genai.ContinuousBatchingPipeline(settings["model"], config, "CPU")
    next_id = 0

    def run(work: Any) -> list[int]:
        nonlocal next_id
        handles = []
        for ids, count in work:
            params = genai.GenerationConfig()
            params.max_new_tokens, params.ignore_eos, params.do_sample = count, True, settings["top_p"]
            if settings["top_p"]:
                params.top_p, params.temperature = _SAMPLING["top_p"], _SAMPLING["temperature"]
            handles.append(pipeline.add_request(next_id, ov.Tensor(np.array([ids], dtype=np.int64)), params))
            next_id += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [len(handle.read_all()[0].generated_ids) for handle in handles]

    return run


def hf(settings: dict[str, Any]) -> Runner:
    """transformers: one batch, padded to the longest prompt, which runs until its longest output is done."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    sampling = {"do_sample": True, "top_k": 0, **_SAMPLING} if settings["top_p"] else {"do_sample": False}

    def run(work: Any) -> list[int]:
        width, longest = max(len(ids) for ids, _ in work), max(count for _, count in work)
        tokens = torch.zeros(len(work), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, (ids, _) in enumerate(work):
            tokens[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        with torch.inference_mode():
            model.generate(tokens, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, **sampling)
        return [count for _, count in work]  # what is beyond a request's own output is not counted

    return run


def llama(settings: dict[str, Any]) -> Runner:
    """llama.cpp by llama-cpp-python: one request after the other."""
    from llama_cpp import Llama

    model = Llama(settings["model"], n_ctx=_MAX_MODEL_LEN, n_threads=os.cpu_count(), verbose=False)
    sampling = {"temp": 0.8, "top_p": 0.95, "top_k": 0} if settings["top_p"] else {"temp": 0.0}

    def run(work: Any) -> list[int]:
        counts = []
        for ids, count in work:
            made = 0
            for _ in model.generate(ids, reset=not settings["prefix_caching"], **sampling):
                made += 1
                if made == count:
                    break
            counts.append(made)
        return counts

    return run


ENGINES: dict[str, Callable[[dict[str, Any]], Runner]] = {
    "trivet": trivet,
    "vllm": vllm,
    "openvino": openvino,
    "hf": hf,
    "llama": llama,
}


def main() -> None:
    """Start an engine and serve until the input ends. What engines print goes to stderr, away from the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES, help="which one")
    parser.add_argument("settings", type=json.loads, help="model, dtype and what else peers.py sends, in JSON")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Scripts beside this one must not be taken for packages of the same name that engines look for.
    here = Path(__file__).resolve().parent
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != here]
    begin = time.perf_counter()
    run = ENGINES[args.engine](args.settings)
    print(json.dumps({"load_s": time.perf_counter() - begin}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        start = time.perf_counter()
        counts = run(work)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "counts": counts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
