"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizer the file was made from."""

from __future__ import annotations

import json
import logging

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from trivet.errors import ModelLoadError
from trivet_hf_tokenizer._gguf_pre import PRE_TOKENIZERS
from trivet_hf_tokenizer.tokenizer import HFTokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CORPUS = [
    "",
    "hello world",
    "  hello\n\n\tworld  ",
    "<|start|>user\nhello<|end|> world<tool>hello",
    "don't DON'T 1234567  3.14  8910 x2",
    "日本語のテキスト 中文, e\u0301 u\u0308 👩\u200d👩\u200d👧 🇫🇷 العربية हिन्दी",
    "def f(x):\n    return {'a': x**2}\r\n",
    " " * 40 + "x\n\n\n\n",
]


def byte_level_keys(backend: Tokenizer, **more: object) -> dict[str, object]:
    """The metadata that a converter makes of a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    special = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [{True: CONTROL, False: USER}.get(special.get(token), NORMAL) for token in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": backend.token_to_id("<|start|>"),
        "eos_token_id": backend.token_to_id("<|end|>"),
        **more,
    }


def sentencepiece_keys(backend: Tokenizer, **more: object) -> dict[str, object]:
    special = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    kinds = [
        BYTE if token.startswith("<0x") else {True: CONTROL, False: USER}.get(special.get(token), NORMAL)
        for token in tokens
    ]
    kinds[0] = UNKNOWN
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [-1000.0 if kind != NORMAL else -float(i) for i, kind in enumerate(kinds)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }


def assert_same_ids(tokenizer: HFTokenizer, reference: Tokenizer, *, add_special_tokens: bool = False) -> None:
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ids == reference.encode(text, add_special_tokens=add_special_tokens).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False), (
            text
        )


def test_byte_level_ids_equal_the_original(backends, write_gguf):
    backend = backends["byte-level"]
    tokenizer = HFTokenizer.from_path(write_gguf(**byte_level_keys(backend)))
    assert_same_ids(tokenizer, backend)
    assert tokenizer.size == backend.get_vocab_size()
    assert tokenizer.bos_token_id == backend.token_to_id("<|start|>")
    assert backend.token_to_id("<|end|>") in tokenizer.eos_token_ids


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_sentencepiece_ids_equal_the_original(backends, write_gguf, kind):
    keys = sentencepiece_keys(backends[kind], add_space_prefix=kind == "llama")
    tokenizer = HFTokenizer.from_path(write_gguf(**keys))
    assert_same_ids(tokenizer, backends[kind], add_special_tokens=True)


def test_a_sentencepiece_file_without_flags_adds_a_blank_and_bos(backends, write_gguf):
    tokenizer = HFTokenizer.from_path(write_gguf(**sentencepiece_keys(backends["llama"])))
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("hello", add_special_tokens=False) == backends["llama"].encode("hello").ids[1:]


def test_pieces_merge_by_score_and_not_by_id(write_gguf):
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    keys = {"model": "llama", "tokens": tokens, "token_type": [UNKNOWN, *[NORMAL] * 5], "add_space_prefix": False}
    better_bc = HFTokenizer.from_path(write_gguf(**keys, scores=[0.0, -9.0, -9.0, -9.0, -2.0, -1.0]))
    assert better_bc.encode("abc") == [tokens.index("a"), tokens.index("bc")]


def test_runs_of_spaces_that_a_converter_wrote_as_spaces_are_found(write_gguf):
    tokens = ["<unk>", "▁", "x", "▁x", "  ", "   "]
    keys = {
        "tokens": tokens,
        "token_type": [UNKNOWN, *[NORMAL] * 3, USER, USER],
        "scores": [0.0, -1.0, -2.0, -3.0, -1e3, -1e3],
    }
    tokenizer = HFTokenizer.from_path(write_gguf(model="llama", add_space_prefix=False, **keys))
    assert tokenizer.encode("  x") == [4, 2]
    assert tokenizer.encode("   x") == [5, 2]
    assert tokenizer.decode([5, 2]) == "   x"


def test_whitespace_behind_phi3s_conversation_tokens_is_part_of_them(backends, write_gguf):
    keys = sentencepiece_keys(backends["gemma"], add_space_prefix=False)
    keys["tokens"] = [*keys["tokens"], "<|user|>", "<|endoftext|>"]
    keys["token_type"] = [*keys["token_type"], CONTROL, CONTROL]
    keys["scores"] = [*keys["scores"], -1000.0, -1000.0]
    user, end = len(keys["tokens"]) - 2, len(keys["tokens"]) - 1
    tokenizer = HFTokenizer.from_path(write_gguf(architecture="phi3", **keys))
    (letter,) = tokenizer.encode("h", add_special_tokens=False)
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    assert tokenizer.encode("<|user|>\n h<|endoftext|>\nh", add_special_tokens=False) == [
        user,
        letter,
        end,
        newline,
        letter,
    ]
    elsewhere = HFTokenizer.from_path(write_gguf(**keys))
    assert elsewhere.encode("<|user|>\nh", add_special_tokens=False) == [user, newline, letter]


def test_flags_for_bos_and_eos_are_followed(backends, write_gguf):
    keys = byte_level_keys(backends["byte-level"], add_bos_token=True, add_eos_token=True)
    tokenizer = HFTokenizer.from_path(write_gguf(**keys))
    bos, eos = keys["bos_token_id"], keys["eos_token_id"]
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [bos, *plain, eos]
    assert tokenizer.encode("") == [bos, eos]


def test_llama3_adds_bos_and_ignores_merges_for_known_words(backends, write_gguf):
    keys = byte_level_keys(backends["byte-level"], pre="llama-bpe")
    keys["tokens"] = [*keys["tokens"], "doll"]  # reachable by no merge
    keys["token_type"] = [*keys["token_type"], NORMAL]
    tokenizer = HFTokenizer.from_path(write_gguf(**keys))
    assert tokenizer.encode("doll") == [keys["bos_token_id"], len(keys["tokens"]) - 1]


def test_the_filling_behind_a_vocabulary_is_not_counted(backends, write_gguf):
    keys = byte_level_keys(backends["byte-level"])
    size = len(keys["tokens"])
    keys["tokens"] = [*keys["tokens"], *(f"[PAD{size + i}]" for i in range(5))]
    keys["token_type"] = [*keys["token_type"], *[UNUSED] * 5]
    assert HFTokenizer.from_path(write_gguf(**keys)).size == size


def test_every_id_that_ends_a_generation_is_found(backends, write_gguf):
    keys = byte_level_keys(backends["byte-level"], eot_token_id=0, eom_token_id=1)
    size = len(keys["tokens"])
    keys["tokens"] = [*keys["tokens"], "<|im_end|>", "<|endoftext|>"]
    keys["token_type"] = [*keys["token_type"], CONTROL, NORMAL]  # only control tokens count by their names
    tokenizer = HFTokenizer.from_path(write_gguf(**keys))
    assert set(tokenizer.eos_token_ids) == {keys["eos_token_id"], 0, 1, size}
    assert len(set(tokenizer.eos_token_ids)) == len(tokenizer.eos_token_ids)


def test_chat_templates_come_from_the_metadata(backends, write_gguf):
    more = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    tokenizer = HFTokenizer.from_path(write_gguf(more, **byte_level_keys(backends["byte-level"])))
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<|start|>hi"


def test_an_embedded_tokenizer_json_is_used_as_it_is(backends, write_gguf):
    backend = backends["gemma"]
    more = {"tokenizer.huggingface.json": backend.to_str()}
    tokenizer = HFTokenizer.from_path(write_gguf(more, model="llama", bos_token_id=1, eos_token_id=2))
    assert_same_ids(tokenizer, backend, add_special_tokens=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.size) == (1, (2,), backend.get_vocab_size())


# ------------------------------------------------------------------------------------------------- pre-tokenizers

# Written out as the original tokenizer.json files have them.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def originals() -> dict[str, list[pre_tokenizers.PreTokenizer]]:
    def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    return {
        "default": [byte_level(True)],
        "gpt-2": [byte_level(True)],
        "olmo": [byte_level(True)],
        "qwen2": [split(QWEN2), byte_level(False)],
        "llama-bpe": [split(QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")), byte_level(False)],
        "tekken": [split(TEKKEN), byte_level(False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level(True)],
        "falcon": [
            split(r"[\p{P}\$\+<=>\^~\|`]+"),
            byte_level(True),
            split("[0-9][0-9][0-9]"),
        ],
        "deepseek-coder": [
            split("[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split("[一-龥ࠀ-一가-퟿]+"),
            pre_tokenizers.Digits(individual_digits=True),
            byte_level(False),
        ],
    }


@pytest.mark.parametrize("pre", sorted(originals()))
def test_text_is_split_as_the_original_splits_it(backends, write_gguf, pre):
    keys = byte_level_keys(backends["byte-level"], pre=pre, add_bos_token=False)
    # With all adjacent bytes merged, ids show where the text was cut.
    alphabet = [token for token in keys["tokens"] if len(token) == 1]
    pairs = [a + b for a in alphabet[:96] for b in alphabet[:96]]
    old = len(keys["tokens"])
    keys["tokens"] = [*keys["tokens"], *(p for p in pairs if p not in set(keys["tokens"]))]
    keys["token_type"] = [*keys["token_type"], *[NORMAL] * (len(keys["tokens"]) - old)]
    keys["merges"] = [f"{p[0]} {p[1]}" for p in keys["tokens"] if len(p) == 2]
    tokenizer = HFTokenizer.from_path(write_gguf(**keys))

    vocab = {token: i for i, token in enumerate(keys["tokens"])}
    ignore = pre in {"llama-bpe", "tekken"}
    reference = Tokenizer(
        models.BPE(vocab=vocab, merges=[tuple(m.split(" ")) for m in keys["merges"]], ignore_merges=ignore)
    )
    if pre in {"qwen2", "olmo"}:
        reference.normalizer = normalizers.NFC()
    reference.pre_tokenizer = pre_tokenizers.Sequence(originals()[pre])
    reference.decoder = decoders.ByteLevel()
    reference.add_special_tokens(["<|start|>", "<|end|>"])
    reference.add_tokens(["<tool>"])
    assert_same_ids(tokenizer, reference)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_known_way_of_splitting_keeps_the_whole_text(backends, write_gguf, pre):
    tokenizer = HFTokenizer.from_path(write_gguf(**byte_level_keys(backends["byte-level"], pre=pre)))
    for text in CORPUS:
        if PRE_TOKENIZERS[pre].nfc and "\u0301" in text:
            continue
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_a_file_that_does_not_say_how_to_split_gets_gpt2s_way_and_a_warning(backends, write_gguf, caplog):
    keys = byte_level_keys(backends["byte-level"])
    del keys["pre"]
    with caplog.at_level(logging.WARNING):
        tokenizer = HFTokenizer.from_path(write_gguf(**keys))
    assert "tokenizer.ggml.pre" in caplog.text
    assert_same_ids(tokenizer, backends["byte-level"])


# ------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "qwen-9"}, r"tokenizer\.ggml\.pre is 'qwen-9'.*qwen2.*set `tokenizer`"),
        ({"model": "t5"}, r"tokenizer\.ggml\.model is 't5'.*set `tokenizer`"),
        ({"eos_token_id": 10_000}, r"eos_token_id is 10000, but there are"),
        ({"merges": ["x"]}, r"merges has 'x', which is no pair"),
        ({"merges": ["no such"]}, r"merges does not fit the tokens"),
        ({"token_type": [1, 2]}, r"token_type must have one number for each"),
        ({"add_bos_token": "yes"}, r"add_bos_token must be bool, got str"),
    ],
)
def test_metadata_that_cannot_be_right_is_named(backends, write_gguf, change, message):
    path = write_gguf(**byte_level_keys(backends["byte-level"], **change))
    with pytest.raises(ModelLoadError, match=rf"model\.gguf: .*{message}"):
        HFTokenizer.from_path(path)


def test_a_token_that_occurs_twice_is_named(backends, write_gguf):
    keys = byte_level_keys(backends["byte-level"])
    keys["tokens"] = [*keys["tokens"][:-1], keys["tokens"][0]]
    with pytest.raises(ModelLoadError, match=r"tokens holds '!' twice"):
        HFTokenizer.from_path(write_gguf(**keys))


@pytest.mark.parametrize("missing", ["model", "tokens", "merges"])
def test_a_file_without_a_tokenizer_says_where_to_get_one(backends, write_gguf, missing):
    keys = byte_level_keys(backends["byte-level"])
    del keys[missing]
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.ggml\.{missing}.*set `tokenizer`"):
        HFTokenizer.from_path(write_gguf(**keys))


def test_a_truncated_file_is_an_error(backends, write_gguf):
    path = write_gguf(**byte_level_keys(backends["byte-level"]))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ModelLoadError, match=r"model\.gguf: truncated"):
        HFTokenizer.from_path(path)
