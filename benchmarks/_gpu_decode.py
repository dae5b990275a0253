"""Decoding with a model of random weights, with and without CUDA graphs."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

Results = dict[str, Any]


class Shape(NamedTuple):
    """Of a model of the Llama architecture."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool

    def layer_bytes(self, width: int) -> int:
        """Bytes of a layer's weights, of ``width`` bytes each."""
        kv = self.hidden // self.heads * self.kv_heads
        return width * self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate)

    def other_bytes(self, width: int) -> int:
        """Bytes of the embedding and the head."""
        return width * self.hidden * self.vocab * (1 if self.tied else 2)


SHAPES = {
    "tiny": Shape(257, 64, 128, 2, 4, 2, True),
    "1b": Shape(128_256, 2048, 8192, 16, 32, 8, True),
    "8b": Shape(128_256, 4096, 14_336, 32, 32, 8, False),
}
#: batch, prompt
LOADS = [(1, 1024), (32, 1024), (128, 512)]
SHORT, LONG = 8, 72
QUICK_LOADS, QUICK_LONG = [(2, 9)], 12
#: seconds that writing a model may take, and bytes that tell how fast that is
WRITING, PROBE = 6.0, 1 << 28


def decode_8b(args: argparse.Namespace, results: Results) -> None:
    """Steps of a model of 8 billion parameters, or of as many of its layers as there is time for."""
    _decode("8b", args, results)


def decode_1b(args: argparse.Namespace, results: Results) -> None:
    """Steps of a model of 1 billion parameters, where what the host does between steps shows."""
    _decode("1b", args, results)


def launch_attention(size: str, args: argparse.Namespace) -> None:
    """Attend a prefill and decodes as the model will, for the kernels to be compiled."""
    from _gpu_speed import step

    from trivet_kernels.triton.attention import paged_attention

    shape = SHAPES[size]
    for queries in (1, 64):
        sizes = 2, queries, 2048, shape.heads, shape.kv_heads, shape.hidden // shape.heads
        paged_attention(**step(args, *sizes))


def _decode(size: str, args: argparse.Namespace, results: Results) -> None:
    """Time of a decode step, from two runs of other lengths, and its share of what memory allows."""
    size = "tiny" if args.quick else size
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what earlier parts have kept is not the engine's
    with TemporaryDirectory(dir=_roomy(SHAPES[size])) as name:
        folder = Path(name)
        register_plugins(folder / "distribution")
        shape = affordable(SHAPES[size], folder, args)
        num_bytes = write_model(folder / "model", shape, args)
        results |= {"model": size, "layers": f"{shape.layers} of {SHAPES[size].layers}", "weight_bytes": num_bytes}
        args.note(f"   {size}: {results['layers']} layers, {num_bytes / 1e9:.2f} GB that a step reads")
        for eager in (True,) if args.interpret else (False, True):
            measure(args, folder / "model", shape, num_bytes, eager, results)


def measure(args: argparse.Namespace, model: Path, shape: Shape, num_bytes: int, eager: bool, results: Results) -> None:
    """One engine under all loads."""
    from _gpu_speed import bandwidth

    from trivet import LLM, SamplingParams

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
        args.note(f"   {name}: started in {results[f'{name}_start_s']} s")
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
            head_dim = shape.hidden // shape.heads
            kv_bytes = batch * (prompt + longest // 2) * shape.layers * 2 * shape.kv_heads * head_dim * 2
            least = (num_bytes + kv_bytes) / bandwidth(args)
            lines.append({"batch": batch, "prompt": prompt, "step_us": seconds * 1e6, "share": least / seconds})
            args.note(f"   {batch:>4} x {prompt}: step {seconds * 1e6:,.0f} us, {least / seconds:.0%} of the roofline")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _roomy(shape: Shape) -> str:
    """A folder in memory where there is twice the room for a model, else one on disk."""
    memory = "/dev/shm"
    need = 2 * (shape.layers * shape.layer_bytes(2) + shape.other_bytes(2))
    there = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > need
    return memory if there else tempfile.gettempdir()


def affordable(shape: Shape, folder: Path, args: argparse.Namespace) -> Shape:
    """The shape in as many layers as can be written to a folder in :data:`WRITING` seconds, but two at least."""
    if args.quick:
        return shape
    probe = torch.ones(PROBE, dtype=torch.uint8, device=args.device)
    path = folder / "probe"
    began = time.perf_counter()
    probe.cpu().numpy().tofile(path)
    rate = PROBE / (time.perf_counter() - began)
    path.unlink()
    count = int((WRITING * rate - shape.other_bytes(2)) / shape.layer_bytes(2))
    return shape._replace(layers=min(shape.layers, max(2, count)))


def write_model(folder: Path, shape: Shape, args: argparse.Namespace) -> int:
    """Write a Llama with random weights and a tokenizer; returns the bytes of weights that a step reads."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=256,
    )
    torch.manual_seed(args.seed)
    width = 4 if args.interpret else 2
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if args.interpret else torch.bfloat16)
    try:
        with torch.device(args.device):
            network = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    network.save_pretrained(folder)
    # Of an embedding that is not also the head a step reads a row per request.
    num_bytes = shape.layers * shape.layer_bytes(width) + shape.vocab * shape.hidden * width
    del network
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
