"""What a model's weights will take: its modules are made on torch's device ``meta``, where tensors have no contents."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from trivet.gguf import GGUFFile
from trivet_torch.weights.gguf_config import config_from_gguf
from trivet_torch.weights.gguf_file import build_uninitialised
from trivet_torch.weights.safetensors_dir import check_folder, check_safetensors, folder_config, has_weights
from trivet_transformers.interface import NAME

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from trivet.model_source import ModelLocation


def plan_causal_lm(location: ModelLocation, dtype: torch.dtype, *, trust_remote_code: bool) -> int | None:
    """Bytes of the parameters and buffers that the model at ``location`` will have in ``dtype``; None where headers do
    not tell: weights that are quantised or not there yet, code that the model brings, and matrices that the
    configuration ties although the files have both, which are one only if their values are the same.

    Raises:
        ModelLoadError: The folder or the file is damaged, or transformers does not know the configuration.
    """
    if location.kind == "gguf":
        return _num_bytes(_build(config_from_gguf(GGUFFile(location.path)), dtype))
    if not has_weights(location.path):
        return None
    files = check_folder(location.path)
    config = folder_config(location.path, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) or getattr(config, "auto_map", None):
        return None
    model = _build(config, dtype)
    if _stores_tied_twice(model, files):
        return None
    return _num_bytes(model, _kept_in_float32(model, dtype))


def _build(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    return build_uninitialised(config, dtype=dtype, device="meta", attn_implementation=NAME)


def _stores_tied_twice(model: PreTrainedModel, files: list[Path]) -> bool:
    stored = {name for file in files for name in check_safetensors(file)}
    tied: dict[str, str] = model.all_tied_weights_keys
    return any(target in stored and source in stored for target, source in tied.items())


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """What is found in the names of parameters that transformers loads in float32 though another type is asked for."""
    kept = model._get_dtype_plan(dtype)
    return re.compile("|".join(pattern.replace("*", ".*") for pattern in kept)) if kept else None


def _num_bytes(model: PreTrainedModel, wide: re.Pattern[str] | None = None) -> int:
    """Of all parameters and buffers, each counted once; those that match ``wide`` as float32."""
    total = sum(buffer.nbytes for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        is_wide = wide is not None and wide.search(name) is not None
        total += parameter.numel() * (4 if is_wide else parameter.element_size())
    return total
