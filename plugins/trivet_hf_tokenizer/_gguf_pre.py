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
        digit_groups: Pattern of ASCII digits that is cut out last, from the words.
        nfc: Whether text is normalised to NFC first.
        ignore_merges: Whether a piece that is in the vocabulary is one token whatever the merges say.
        add_bos: Whether a text begins with the BOS token when the file does not say.
    """

    splits: tuple[str, ...] = ()
    gpt2_words: bool = False
    digit_groups: str | None = None
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


def _characters(ranges: str) -> str:
    """A class of characters from hexadecimal code points and ranges of them."""
    parts = (item.split("-") for item in ranges.split())
    return "[" + "".join("-".join(rf"\x{{{code}}}" for code in part) for part in parts) + "]"


# CJK ideographs, everything from U+0800 to them, Hangul syllables.
_CJK = _characters("4E00-9FA5 800-4E00 AC00-D7FF") + "+"
_KANA_AND_HAN = _characters("4E00-9FA5 3040-309F 30A0-30FF") + "+"
# ASCII punctuation, its full-width forms, quotation marks, CJK punctuation.
_PUNCTUATION = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002") + "+"
# The letters with upper and lower case that DeepSeek's tokenizer lists.
_CASED_LETTERS = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 "
    "1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 "
    "2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A "
    "10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_PUNCTUATED_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_FINNISH_WORDS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"

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
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _PUNCTUATED_WORDS))
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
        ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+",), gpt2_words=True, digit_groups="[0-9][0-9][0-9]")),
        (
            "deepseek-llm",
            PreTokenizer(("[\r\n]", rf"\s?{_CASED_LETTERS}+", rf"\s?{_PUNCTUATION}", r"\s+$", _CJK, r"\p{N}+")),
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
