"""One way in to all weight sources."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trivet.gguf import GGUFFile, eos_token_ids
from trivet.model_source import ModelLocation, resolve_model
from trivet_torch.weights.gguf_file import load_gguf
from trivet_torch.weights.safetensors_dir import folder_eos_token_ids, load_folder

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class LoadedModelInfo:
    """What is known about a model after loading.

    Attributes:
        location: Where its files are.
        config: Its transformers configuration.
        eos_token_ids: Ids that end a generation, the main one first: from ``generation_config.json``, else
            ``config.json``, or from the metadata of a GGUF file.
        seconds: How long loading took.
    """

    location: ModelLocation
    config: PreTrainedConfig
    eos_token_ids: list[int]
    seconds: float


def load_causal_lm(
    location: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    attn_implementation: str,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, LoadedModelInfo]:
    """Load a decoder-only model with its language modelling head, ready for inference.

    Args:
        location: A Hugging Face folder, a GGUF file, a hub id (downloaded if need be) or ``demo``; see
            :func:`trivet.model_source.resolve_model`.
        dtype: Of the parameters.
        device: Where the parameters go.
        attn_implementation: A name in transformers' attention interface, such as ``sdpa``.
        trust_remote_code: Whether Python code that the model brings may run.

    Returns:
        The model, in evaluation mode and without gradients, and what is known about it.

    Raises:
        ModelLoadError: Anything is missing, damaged or not supported; the message names it and says what to do.
    """
    start = time.perf_counter()
    found = resolve_model(location)
    if found.kind == "gguf":
        file = GGUFFile(found.path)
        model = load_gguf(file, dtype=dtype, device=device, attn_implementation=attn_implementation)
        eos = eos_token_ids(file)
    else:
        model = load_folder(
            found.path,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        eos = folder_eos_token_ids(found.path, model.config)
    model.train(mode=False)
    model.requires_grad_(False)
    return model, LoadedModelInfo(found, model.config, eos, time.perf_counter() - start)
