"""Entry point: offers the tokenizer, and imports nothing that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.hookspecs import hookimpl
from trivet.provider import Provider


@hookimpl
def trivet_providers() -> Sequence[Provider]:
    """Offer the tokenizer of Hugging Face folders and GGUF files."""
    return [
        Provider(
            role="tokenizer",
            name="hf_tokenizer",
            factory="trivet_hf_tokenizer.tokenizer:build",
            options="trivet_hf_tokenizer.options:HFTokenizerOptions",
            summary="Tokenizers of Hugging Face folders and GGUF files, with their chat templates.",
        )
    ]
