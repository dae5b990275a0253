"""The type that a model computes in."""

from __future__ import annotations

import torch

from trivet.model_source import read_json, resolve_model


def resolve_dtype(name: str, location: str, device: str) -> torch.dtype:
    """The torch type for a configured name. ``auto`` is the type that a folder's configuration names; for a GGUF file,
    whose tensors are dequantised, bfloat16 on an accelerator and float32 on a CPU."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    found = resolve_model(location)
    if found.kind == "gguf":
        return torch.float32 if device == "cpu" else torch.bfloat16
    config = read_json(found.path / "config.json")
    for part in (config, config.get("text_config", {})):
        stored = part.get("dtype") or part.get("torch_dtype")
        if stored in {"float32", "bfloat16", "float16"}:
            return getattr(torch, stored)  # type: ignore[no-any-return]
    # Files in MXFP4 need not name a type: the rest of them is in bfloat16, which also holds what is in MXFP4.
    quantized = config.get("quantization_config") or {}
    return torch.bfloat16 if quantized.get("quant_method") == "mxfp4" else torch.float32
