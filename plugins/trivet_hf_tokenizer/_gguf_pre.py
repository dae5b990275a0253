"""The ways to split text into words before byte-pair merges, by the names that GGUF files use for them.

A GGUF file holds the vocabulary and merges of a byte-level BPE tokenizer, but of its normaliser and pre-tokenizer only
a name (``tokenizer.ggml.pre``), which llama.cpp assigns by the tokenizer it was converted from. The table gives back
what the tokenizers of those names do. Regular expressions are in Oniguruma's syntax, as the ``tokenizers`` library
takes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a family of byte-level tokenizers prepares text.

    Attributes:
        splits: Each pattern in turn cuts every piece so far into its matches and what lies between them.
        gpt2_words: Whether the pieces are then split by GPT-2's own pattern.
        nfc: Whether text is normalised to NFC first.
        ignore_merges: Whether a piece that is in the vocabulary is one token whatever the merges say.
        add_bos: Whether a text begins with the BOS token when the file does not say.
    """

    splits: tuple[str, ...] = ()
    gpt2_words: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The pattern of tiktoken's cl100k and its heirs, which differ in how many digits go together."""
    return rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, suffixes: str) -> str:
    """The pattern of tiktoken's o200k and its heirs, which also cut where lower case turns to upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{suffixes}|{start}{upper}+{lower}*{suffixes}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⲳⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)
_PUNCTUATED_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_FINNISH_WORDS = " ?[^(\\s|.,!?…。，、।۔،)]+"  # noqa: RUF001

_GPT2 = PreTokenizer(gpt2_words=True)
_GPT_NEOX = PreTokenizer(gpt2_words=True, nfc=True)
_DIGITS_GPT2 = PreTokenizer((r"\p{N}",), gpt2_words=True)
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_LLAMA3_MERGING = PreTokenizer((_words(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_QWEN35 = PreTokenizer(
    (rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    nfc=True,
)
_O200K = PreTokenizer((_cased_words(r"\p{N}{1,3}", rf"{_SUFFIXES}?"),))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED_WORDS))  # noqa: RUF001
_BAILING = PreTokenizer(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",),
)


def _by_name(names: str, value: PreTokenizer) -> Iterable[tuple[str, PreTokenizer]]:
    return ((name, value) for name in names.split())


PRE_TOKENIZERS: dict[str, PreTokenizer] = dict(
    [
        *_by_name("default gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0", _GPT2),
        *_by_name("exaone4 jais trillion granite-docling mellum modern-bert", _GPT2),
        *_by_name("olmo mpt", _GPT_NEOX),
        *_by_name("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3),
        *_by_name("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3_MERGING),
        *_by_name("qwen2 deepseek-r1-qwen kormo megrez hunyuan solar-open stablelm2 f2llmv2", _QWEN2),
        ("grok-2", PreTokenizer((_words(r"\p{N}"),))),
        ("qwen35", _QWEN35),
        *_by_name("gpt-4o llama4 kanana2 minimax-m2", _O200K),
        ("tekken", PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True)),
        *_by_name("smollm starcoder refact codeshell exaone minerva-7b mellum2", _DIGITS_GPT2),
        ("command-r", PreTokenizer((r"\p{N}",), gpt2_words=True, nfc=True)),
        ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+",), gpt2_words=True)),
        (
            "deepseek-llm",
            PreTokenizer(
                ("[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+"),  # noqa: RUF001
            ),
        ),
        ("deepseek-coder", PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
        *_by_name("deepseek-v3 hunyuan-dense joyai-llm", _DEEPSEEK_V3),
        *_by_name("bailingmoe bailingmoe2 llada-moe", _BAILING),
        *_by_name("poro-chat bloom gpt3-finnish", PreTokenizer((_FINNISH_WORDS,))),
        ("viking", PreTokenizer((_FINNISH_WORDS, r"\p{N}"))),
        (
            "seed-coder",
            PreTokenizer(
                (rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
            ),
        ),
    ]
)  # fmt: skip
"""``tokenizer.ggml.pre`` → what it stands for."""
