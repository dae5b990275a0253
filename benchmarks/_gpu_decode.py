"""Decoding with a model of random weights, with and without CUDA graphs."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import sys
import time
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Results = dict[str, Any]

#: vocabulary, hidden size, intermediate size, layers, query heads, key heads
MODELS = {
    "tiny": (257, 64, 128, 2, 4, 2),
    "1b": (128_256, 2048, 8192, 16, 32, 8),
    "8b": (128_256, 4096, 14_336, 32, 32, 8),
}
#: batch, prompt
LOADS = [(1, 1024), (32, 1024), (128, 512)]
SHORT, LONG = 8, 72
QUICK_LOADS, QUICK_LONG = [(2, 9)], 12


def decode(args: argparse.Namespace, results: Results) -> None:
    """Time of a decode step, from two runs of other lengths, and its share of what memory allows."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        register_plugins(folder / "distribution")
        size = "tiny" if args.quick else args.model
        model = folder / "model"
        num_bytes = write_model(model, size, args)
        results |= {"model": size, "weight_bytes": num_bytes}
        bandwidth = _bandwidth(args)
        for eager in (True,) if args.interpret else (False, True):
            measure(args, model, size, num_bytes, bandwidth, eager, results)


def measure(
    args: argparse.Namespace,
    model: Path,
    size: str,
    num_bytes: int,
    bandwidth: float,
    eager: bool,
    results: Results,
) -> None:
    """One engine under all loads."""
    from trivet import LLM, SamplingParams

    _, hidden, _, layers, heads, kv_heads = MODELS[size]
    loads, longest = (QUICK_LOADS, QUICK_LONG) if args.quick else (LOADS, LONG)
    began = time.perf_counter()
    options: dict[str, Any] = {"max_num_seqs": max(batch for batch, _ in loads)}
    if not args.interpret:
        options |= {"enforce_eager": eager, "gpu_memory_utilization": 0.5}
    dtype = "float32" if args.interpret else "bfloat16"
    with LLM(
        str(model), dtype=dtype, device=args.device, max_model_len=2048 if not args.quick else 64, **options
    ) as llm:
        name = "eager" if eager else "graphs"
        lines: list[Results] = results.setdefault(name, [])
        results[f"{name}_start_s"] = round(time.perf_counter() - began, 2)
        print(f"   {name}: started in {results[f'{name}_start_s']} s")
        for batch, prompt in loads:
            took = []
            for max_tokens in (SHORT, SHORT, longest):  # the first warms up
                prompts = [{"prompt_token_ids": torch.randint(1, 250, (prompt,)).tolist()} for _ in range(batch)]
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
                at = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                took.append(time.perf_counter() - at)
                assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
            seconds = (took[2] - took[1]) / (longest - SHORT)
            kv_bytes = batch * (prompt + longest // 2) * layers * 2 * kv_heads * (hidden // heads) * 2
            least = (num_bytes + kv_bytes) / bandwidth
            lines.append({"batch": batch, "prompt": prompt, "step_us": seconds * 1e6, "share": least / seconds})
            print(f"   {batch:>4} x {prompt}: step {seconds * 1e6:,.0f} us, {least / seconds:.0%} of the roofline")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_model(folder: Path, size: str, args: argparse.Namespace) -> int:
    """Write a Llama with random weights and a tokenizer; returns the bytes of weights that a step reads."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab, hidden, intermediate, layers, heads, kv_heads = MODELS[size]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
    )
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        network = LlamaForCausalLM(config).to(torch.float32 if args.interpret else torch.bfloat16)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    network.save_pretrained(folder)
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return num_bytes


def register_plugins(folder: Path) -> None:
    """Where Trivet is not installed, let its plugins be found in the checkout."""
    try:
        importlib.metadata.distribution("trivet")
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
        info = folder / "trivet-0.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trivet\nVersion: 0.0\n")
        points = "\n".join(f"{name} = {value}" for name, value in project["entry-points"]["trivet"].items())
        (info / "entry_points.txt").write_text(f"[trivet]\n{points}\n")
        sys.path.insert(0, str(folder))


def _bandwidth(args: argparse.Namespace) -> float:
    from _gpu_speed import ceilings

    measured: Results = {}
    ceilings(args, measured)
    return float(measured["copy_gb_per_s"] * 1e9)
