"""The tokenizer of a GGUF file, rebuilt from its metadata.

GGUF keeps a vocabulary, but not the program that used it; this module restores that program, so that ids equal those
of the tokenizer that the file was converted from.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trivet.errors import ModelLoadError
from trivet_hf_tokenizer._gguf_pre import PRE_TOKENIZERS, PreTokenizer
from trivet_hf_tokenizer._parts import TokenizerParts, count_ids, is_padding, unique

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")

_REMEDY = "set `tokenizer` to a folder with the tokenizer.json of the original model"
_DAMAGED = "the file is damaged: download or convert it again"
_SPACE = "▁"

# Names of the special tokens for templates, and the keys of their ids.
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# A file names one or two of the ids that end a generation, while the original generation_config.json may list more.
# These control tokens end a turn or a document in every model family that has them.
_END_TOKENS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
        "<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>", "<end_of_utterance>", "<|eot|>", "<EOT>", "<eos>",
        "</s>", "[EOS]", "[EOT]", "<｜end▁of▁sentence｜>",  # noqa: RUF001
    }
)  # fmt: skip


class _TokenType(IntEnum):
    """``llama_token_type`` of the entries of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Metadata:
    """The ``tokenizer`` keys of a file, with their types checked."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str, kind: type[_Value]) -> _Value | None:
        """The value of a key, None when it is absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ModelLoadError(f"{self.path}: {key} must be {kind.__name__}, got {type(value).__name__}; {_DAMAGED}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, bool)
        return default if value is None else value

    def token_id(self, key: str, size: int) -> int | None:
        """An id; None when it is absent or -1, which some converters write for "none"."""
        value = self.get(f"tokenizer.ggml.{key}", int)
        if value is None or value in {-1, 0xFFFFFFFF}:
            return None
        if not 0 <= value < size:
            raise ModelLoadError(
                f"{self.path}: tokenizer.ggml.{key} is {value}, but there are {size} tokens; {_DAMAGED}"
            )
        return value

    def strings(self, key: str) -> list[str]:
        value = self._values.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path}: the metadata lacks {key}, so the file holds no tokenizer; {_REMEDY}")
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ModelLoadError(
                f"{self.path}: {key} must be an array of strings, got {type(value).__name__}; {_DAMAGED}"
            )
        return list(value)

    def numbers(self, key: str, size: int) -> list[Any] | None:
        """A numeric array with one entry per token, None when it is absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if not hasattr(value, "tolist") or len(value) != size:
            raise ModelLoadError(f"{self.path}: {key} must have one number for each of the {size} tokens; {_DAMAGED}")
        numbers: list[Any] = value.tolist()
        return numbers


def load_gguf(path: Path) -> TokenizerParts:
    """Build the tokenizer of a GGUF file.

    Raises:
        ModelLoadError: The file is missing or damaged, has no tokenizer, or one of a kind that cannot be rebuilt.
    """
    from trivet.gguf import GGUFFile

    metadata = _Metadata(path, GGUFFile(path).metadata)
    if embedded := metadata.get("tokenizer.huggingface.json", str):
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(embedded)
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(
                f"{path}: tokenizer.huggingface.json is no valid tokenizer: {error}; {_DAMAGED}"
            ) from error
        return _parts(metadata, backend, [backend.id_to_token(i) or "" for i in range(count_ids(backend))], ())
    kind = metadata.get("tokenizer.ggml.model", str)
    if kind not in {"gpt2", "llama"}:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.model is {kind!r}, and only 'gpt2' (byte-level BPE) and 'llama' (sentencepiece "
            f"BPE) can be rebuilt from a GGUF file; {_REMEDY}"
        )
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.numbers("tokenizer.ggml.token_type", len(tokens)) or [_TokenType.NORMAL] * len(tokens)
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens)
        _add_tokens(backend, tokens, types)
    else:
        # Converters turn the space mark of user-defined tokens into spaces, but runs of spaces are looked up after the
        # text has got its marks, so they are found by merging and not as they are written.
        pieces = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        backend = _sentencepiece(metadata, pieces, types)
        # Phi-3's tokens of a conversation swallow the blanks and newlines behind them; the format has no flag for it.
        rstrip = metadata.get("general.architecture", str) == "phi3"
        _add_tokens(backend, [piece if piece.strip(_SPACE) else "" for piece in pieces], types, rstrip=rstrip)
    return _parts(metadata, backend, tokens, types)


def _parts(metadata: _Metadata, backend: Backend, tokens: list[str], types: Sequence[int]) -> TokenizerParts:
    size = len(tokens)
    ids = {name: metadata.token_id(key, size) for name, key in _SPECIAL_KEYS.items()}
    marked = [i for i, kind in enumerate(types) if kind == _TokenType.CONTROL and tokens[i] in _END_TOKENS]
    while size and is_padding(tokens[size - 1], size - 1):
        size -= 1
    templates = {}
    if template := metadata.get("tokenizer.chat_template", str):
        templates["default"] = template
    for name in (
        metadata.strings("tokenizer.chat_templates") if metadata.get("tokenizer.chat_templates", object) else ()
    ):
        if template := metadata.get(f"tokenizer.chat_template.{name}", str):
            templates[name] = template
    return TokenizerParts(
        source=str(metadata.path),
        backend=backend,
        size=size,
        bos_token_id=ids["bos_token"],
        eos_token_ids=unique([*(metadata.token_id(key, len(tokens)) for key in _END_KEYS), *marked]),
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
        chat_templates=templates,
    )


def _byte_level(metadata: _Metadata, tokens: list[str]) -> Backend:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pre = _pre_tokenizer(metadata)
    vocab = _vocabulary(metadata, tokens)
    merges = [_pair(metadata, merge) for merge in metadata.strings("tokenizer.ggml.merges")]
    backend = Backend(_bpe(metadata, vocab, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_words),
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in [pre.digit_groups] if pattern),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _add_bos_and_eos(metadata, backend, tokens, add_bos=pre.add_bos)
    return backend


def _pre_tokenizer(metadata: _Metadata) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", str)
    if name is None:
        _log.warning(
            "%s does not say how text is split before tokenizing (tokenizer.ggml.pre); GPT-2's way is assumed. If the "
            "model answers oddly, %s.", metadata.path, _REMEDY,
        )  # fmt: skip
        name = "gpt-2"
    if name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{metadata.path}: tokenizer.ggml.pre is {name!r}, which is not known (known: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}); {_REMEDY}"
        )
    return PRE_TOKENIZERS[name]


def _pair(metadata: _Metadata, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelLoadError(
            f"{metadata.path}: tokenizer.ggml.merges has {merge!r}, which is no pair of tokens; {_DAMAGED}"
        )
    return left, right


def _sentencepiece(metadata: _Metadata, pieces: list[str], types: list[int]) -> Backend:
    """Sentencepiece's BPE: pieces with scores, the best neighbours merged first, unknown characters as bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers

    vocab = _vocabulary(metadata, pieces)
    scores = metadata.numbers("tokenizer.ggml.scores", len(pieces))
    unknown = metadata.token_id("unknown_token_id", len(pieces))
    if unknown is None and _TokenType.UNKNOWN in types:
        unknown = types.index(_TokenType.UNKNOWN)
    model = _bpe(
        metadata, vocab, derive_merges(vocab, pieces, types, scores),
        byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else pieces[unknown],
    )  # fmt: skip
    backend = Backend(model)
    marks = normalizers.Replace(" ", _SPACE)
    decoder: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marks])
        decoder.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = marks
    backend.decoder = decoders.Sequence(decoder)
    _add_bos_and_eos(metadata, backend, pieces, add_bos=True)
    return backend


def derive_merges(
    vocab: Mapping[str, int], pieces: Sequence[str], types: Sequence[int], scores: Sequence[float] | None
) -> list[tuple[str, str]]:
    """The merges that make byte-pair encoding join pieces as sentencepiece does, best piece first.

    Every cut of a piece into two pieces of the vocabulary is a merge. The order is that of the scores, or of the ids if
    there are none; user-defined pieces, which sentencepiece finds before all others, come first. No text merges into
    control and byte tokens.
    """
    joined = {_TokenType.NORMAL, _TokenType.USER_DEFINED, _TokenType.UNUSED}
    order = [i for i, kind in enumerate(types) if kind in joined]
    if scores is not None:
        ranks = [1.0e9 if kind == _TokenType.USER_DEFINED else score for kind, score in zip(types, scores, strict=True)]
        order.sort(key=ranks.__getitem__, reverse=True)
    # The hot loop of loading a vocabulary of 262,144 pieces: 1.2 million cuts are tried.
    return [
        (left, right)
        for piece in map(pieces.__getitem__, order)
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
    ]


def _vocabulary(metadata: _Metadata, tokens: list[str]) -> dict[str, int]:
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelLoadError(f"{metadata.path}: tokenizer.ggml.tokens holds {twice!r} twice; {_DAMAGED}")
    return vocab


def _bpe(metadata: _Metadata, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    from tokenizers import models

    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(
            f"{metadata.path}: tokenizer.ggml.merges does not fit the tokens: {error}; {_DAMAGED}"
        ) from error


def _add_tokens(backend: Backend, tokens: list[str], types: list[int], *, rstrip: bool = False) -> None:
    """Register the tokens that are found in a text as they are written; all but user-defined ones are special.

    With ``rstrip``, special tokens written ``<|…|>`` take in the whitespace that follows them.
    """
    from tokenizers import AddedToken

    special = {_TokenType.CONTROL, _TokenType.UNKNOWN}
    greedy = {token for token in tokens if rstrip and token.startswith("<|")} - {"<|endoftext|>"}
    for wanted, is_special in ((special, True), ({_TokenType.USER_DEFINED}, False)):
        added = [
            AddedToken(
                token,
                normalized=False,
                special=is_special,
                rstrip=is_special and token in greedy,
            )
            for token, kind in zip(tokens, types, strict=True)
            if token and kind in wanted
        ]
        (backend.add_special_tokens if is_special else backend.add_tokens)(added)


def _add_bos_and_eos(metadata: _Metadata, backend: Backend, tokens: list[str], *, add_bos: bool) -> None:
    from tokenizers import processors

    bos = metadata.token_id("bos_token_id", len(tokens))
    eos = metadata.token_id("eos_token_id", len(tokens))
    before = [bos] if bos is not None and metadata.flag("tokenizer.ggml.add_bos_token", add_bos) else []
    after = [eos] if eos is not None and metadata.flag("tokenizer.ggml.add_eos_token", default=False) else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)],
            special_tokens=[(tokens[i], i) for i in {*before, *after}],
        )
