"""The fakes and small tokenizers of the two usual kinds pass the suite of their role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from trivet.testing.suites import TokenizerSuite


class TestFake(TokenizerSuite):
    use = "fake"
    texts = ("The capital of France is", "one, two, three: (four)", "[x] {y}")


def byte_level() -> Tokenizer:
    """GPT-2's kind: bytes and merges."""
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "©"), ("o", "n")]
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Gemma's kind: pieces, and bytes for everything else."""
    pieces = ["▁", "t", "h", "e", "he", "the", "▁the", "o", "n", "on", "é"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("h", "e"), ("t", "he"), ("▁", "the"), ("o", "n")]
    model = models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=merges, byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


CHAT = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


class _Folder(TokenizerSuite):
    use = "hf_tokenizer"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _files(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("tokenizer")
        cls.build().save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
        settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        cls.model = str(Path(folder))


class TestByteLevel(_Folder):
    build = staticmethod(byte_level)


class TestSentencePiece(_Folder):
    build = staticmethod(sentencepiece)
