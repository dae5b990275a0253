"""Weight sources: Hugging Face folders, hub models and GGUF files."""

from __future__ import annotations

from trivet_torch.weights.source import LoadedModelInfo, load_causal_lm

__all__ = ["LoadedModelInfo", "load_causal_lm"]
