"""Small tokenizers built on the spot, and the real ones when a folder of models is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BYTE_MERGES = [("Ġ", "w"), ("o", "r"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ã", "©"), ("Ġw", "or")]
PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "é",
    "ll",
    "he",
    "hell",
    "hello",
    "▁w",
    "or",
    "▁wor",
    "ld",
    "▁world",
    "\n",
]


def build_byte_level() -> Tokenizer:
    """GPT-2's kind: ids 0 … 255 are single bytes, then merges, then two special tokens and an added one."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in BYTE_MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=BYTE_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def build_sentencepiece(*, prefix: bool) -> Tokenizer:
    """Llama 2's kind (``prefix``: a text begins with a blank) or Gemma's: pieces, and bytes for everything else."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in PIECES
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in PIECES and piece[cut:] in PIECES
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return tokenizer


def build_words(decoder: Any) -> Tokenizer:
    """Whole words, to be joined by ``decoder``."""
    tokens = ["<unk>", "hello", "▁hello", "world", "##ing", "▁▁", ".", "n't", "<s>", "</s>", "<tool>"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": build_byte_level,
    "llama": lambda: build_sentencepiece(prefix=True),
    "gemma": lambda: build_sentencepiece(prefix=False),
    "metaspace": lambda: build_words(decoders.Metaspace()),
    "wordpiece": lambda: build_words(decoders.WordPiece()),
    "no decoder": lambda: build_words(None),
}


@pytest.fixture(scope="session")
def backends() -> dict[str, Tokenizer]:
    """One tokenizer of each kind."""
    return {name: build() for name, build in BUILDERS.items()}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a tokenizer's folder: ``save(backend, tokenizer_config={...}, generation_config={...})``."""

    def write(backend: Tokenizer | None = None, **files: Any) -> Path:
        if backend is not None:
            backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file without tensors: keys of ``tokenizer.ggml`` by keyword, others in ``more``."""

    def write(more: dict[str, str] | None = None, architecture: str = "llama", **keys: Any) -> Path:
        import gguf

        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in keys.items():
            name = f"tokenizer.ggml.{key}"
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_array(name, value)
        for name, text in (more or {}).items():
            writer.add_string(name, text)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
