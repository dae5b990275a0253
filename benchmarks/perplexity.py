"""Perplexity on a fixed text, beside the speed of a single stream, for several ways to hold a model's weights.

    python benchmarks/perplexity.py MODEL [--quantization none int8 int4 gguf]
        [--config '{"use": "int8", "group": 128}']

Each value of `--quantization` is a provider with its defaults (`none`: the weights in the model's dtype), each
`--config` a provider with options, in JSON. They are measured one after the other, each in an engine of its own, which
is closed before the next starts. The text (data/text.txt, 4,238 tokens for Qwen2.5) is cut into windows of 1,024
tokens, and the first token of each is not counted. It has three parts: the beginning of "Alice's Adventures in
Wonderland" by Lewis Carroll (1865, in the public domain), a section of this project's documentation, and one of its
modules, as they were when the text was put together. Prints a JSON line per configuration and a table, whose changes
are relative to the first one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivet import LLM, SamplingParams

TEXT = Path(__file__).parent / "data" / "text.txt"


def config(args: argparse.Namespace, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """An engine's, with a quantization provider or without."""
    plugins: dict[str, Any] = {
        "scheduler": {"use": "continuous", "max_num_batched_tokens": 512},
        "model": {"use": args.model_plugin},
    }
    if quantization is not None:
        plugins["quantization"] = dict(quantization)
    return {"model": args.model, "dtype": args.dtype, "max_model_len": args.window + 1, "plugins": plugins}


def perplexity(llm: LLM, windows: Sequence[Sequence[int]]) -> float:
    """The exponential of the mean of minus the logarithm of each token's probability."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    logprobs: list[float] = []
    for window in windows:
        (output,) = llm.generate([{"prompt_token_ids": list(window)}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        found = zip(window[1:], output.prompt_logprobs[1:], strict=True)
        logprobs += [entry[token].logprob for token, entry in found if entry is not None]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def single_stream(llm: LLM, prompt: Sequence[int], count: int, repeat: int) -> float:
    """Output tokens per second of one request, once the first token is there: the best of several runs."""
    if count < 2:
        return 0.0
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    seconds = []
    for _ in range(repeat):
        (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        times = output.metrics
        assert times is not None
        assert times.first_token_time is not None
        assert times.finished_time is not None
        seconds.append(times.finished_time - times.first_token_time)
    return (count - 1) / min(seconds)


def measure(args: argparse.Namespace, name: str, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """All figures of one configuration."""
    begin = time.perf_counter()
    with LLM.from_config(config(args, quantization)) as llm:
        startup = time.perf_counter() - begin
        ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))[: args.tokens]
        windows = [ids[first : first + args.window] for first in range(0, len(ids), args.window)]
        windows = [window for window in windows if len(window) > 1]
        begin = time.perf_counter()
        value = perplexity(llm, windows)
        seconds = time.perf_counter() - begin
        return {
            "weights": name,
            "perplexity": round(value, 4),
            "tokens": sum(len(window) - 1 for window in windows),
            "prompt_tokens_per_s": round(len(ids) / seconds, 1),
            "single_stream_tokens_per_s": round(single_stream(llm, ids[:16], args.output_len, args.repeat), 2),
            "startup_s": round(startup, 2),
        }


def main() -> None:
    """Measure every configuration and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder, a GGUF file or `demo`")
    parser.add_argument("--quantization", nargs="*", default=None, help="providers with their defaults, or `none`")
    parser.add_argument("--config", action="append", default=[], type=json.loads, help="a provider with options, JSON")
    parser.add_argument("--model-plugin", default="native", help="the provider of the model (default: native)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: bfloat16)")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are predicted together (default: 1024)")
    parser.add_argument("--tokens", type=int, help="of the text, from its beginning (default: all)")
    parser.add_argument(
        "--output-len", type=int, default=64, help="tokens of the single stream; 0: do not measure it (default: 64)"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of the single stream, the best of which counts (default: 3)"
    )
    args = parser.parse_args()
    for name, least in {"window": 2, "tokens": 2, "output_len": 0, "repeat": 1}.items():
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    names = args.quantization
    if names is None:
        names = [] if args.config else ["none", "int8", "int4"]
    runs: list[tuple[str, Mapping[str, Any] | None]] = [
        (name, None if name == "none" else {"use": name}) for name in names
    ]
    runs += [(json.dumps(given), given) for given in args.config]
    lines = []
    for name, quantization in runs:
        lines.append(measure(args, name, quantization))
        print(json.dumps(lines[-1]), flush=True)
    print("| weights | perplexity | change | single stream, tokens/s | prompt, tokens/s | start, s |")
    print("|---|---|---|---|---|---|")
    for line in lines:
        change = line["perplexity"] / lines[0]["perplexity"] - 1
        speeds = f"{line['single_stream_tokens_per_s']:g} | {line['prompt_tokens_per_s']:g} | {line['startup_s']:g}"
        print(f"| {line['weights']} | {line['perplexity']:.3f} | {change:+.2%} | {speeds} |")


if __name__ == "__main__":
    main()
