"""Tiny random models of real architectures, and the greedy outputs that transformers' ``generate`` gives for them."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trivet.testing.fakes import FakeTokenizer

VOCAB = FakeTokenizer().size
CONTEXT = 128
LONGEST = 64  # prompt and output of the longest request

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | {"head_dim": 16},
    "gemma3_text": _GROUPED
    | {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral": _GROUPED | {"sliding_window": 9},
    "phi3": _GROUPED,
    "gpt_neox": _COMMON,
}


def make_model(family: str, folder: Path) -> Path:
    """Write a model of ``family`` whose logits have a standard deviation of at least 1, in float32."""
    torch.manual_seed(sorted(FAMILIES).index(family))
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and "weight" in name:
                # Fresh norms are all ones (or zeros): make them matter.
                parameter.add_(torch.randn_like(parameter) * 0.1)
        spread = float(model(torch.arange(VOCAB)[None, :64]).logits.std())
        head = model.get_output_embeddings()
        head.weight.mul_(max(1.0, 2.0 / spread))
    path = folder / family
    model.save_pretrained(path)
    return path


def make_work(count: int, seed: int) -> list[tuple[list[int], int]]:
    """``count`` prompts of mixed lengths with the number of tokens to generate."""
    rng = random.Random(seed)
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40]
    return [
        ([rng.randrange(VOCAB) for _ in range(rng.choice(lengths))], rng.choice([1, 2, 5, 9, 16, 24]))
        for _ in range(count)
    ]


def reference(path: Path, work: list[tuple[list[int], int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens, and for each the gap between the two largest logits; prompts of one length share a batch,
    unpadded."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    by_length = defaultdict(list)
    for i, (prompt, _) in enumerate(work):
        by_length[len(prompt)].append(i)
    tokens: list[list[int]] = [[] for _ in work]
    gaps: list[list[float]] = [[] for _ in work]
    for indices in by_length.values():
        ids = torch.tensor([work[i][0] for i in indices])
        longest = max(work[i][1] for i in indices)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=0,
            )
        best = torch.stack(out.logits, 1).topk(2, dim=-1).values
        gap = (best[..., 0] - best[..., 1]).tolist()
        for row, i in enumerate(indices):
            tokens[i] = out.sequences[row, len(work[i][0]) :][: work[i][1]].tolist()
            gaps[i] = gap[row][: work[i][1]]
    return tokens, gaps


def differences(got: list[list[int]], want: list[list[int]], gaps: list[list[float]]) -> list[str]:
    """Differences that are no near-ties: only the first one of a request counts, what follows it had other inputs."""
    found = []
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        at = next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None and gaps[i][at] > 1e-5:
            found.append(f"request {i} token {at}: {a[at]} instead of {b[at]}, which is ahead by {gaps[i][at]:.2g}")
    return found


def ties(got: list[list[int]], want: list[list[int]]) -> int:
    """Requests that differ at all."""
    return sum(a != b for a, b in zip(got, want, strict=True))


#: windows of the groups of layers, where not all layers keep everything
WINDOWS: dict[str, tuple[int | None, ...]] = {"gemma3_text": (9, 9, 9, None), "mistral": (9,)}


def settings(model: Path, family: str, *, block_size: int, budget: int, small: bool, **roles: Any) -> dict[str, Any]:
    """An engine's configuration; a ``small`` pool holds one request of the full context and little more."""
    cache = {"use": "paged", "block_size": block_size}
    if small:
        whole = -(-LONGEST // block_size)
        # A window's blocks, and those of the tokens that a step computes, wherever in a block they begin.
        blocks = [
            whole if window is None else min(whole, (window - 1 + budget + block_size - 2) // block_size + 1)
            for window in WINDOWS.get(family, (None,))
        ]
        cache["num_blocks"] = 1 + sum(blocks) + 2
    else:
        cache["num_blocks"] = 60_000 // block_size  # all requests of a test, in every group
    scheduler = {"use": "continuous", "max_num_batched_tokens": budget, "max_num_seqs": 24}
    plugins = {"cache": cache, "scheduler": scheduler}
    return {
        "model": str(model),
        "max_model_len": LONGEST,
        "dtype": "float32",
        "device": "cpu",
        "plugins": plugins | roles,
    }
