"""The vocabularies of real models: Qwen2.5 (byte-level, 151,665 ids) and Gemma 3 (sentencepiece, 262,144 ids)."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trivet_hf_tokenizer.tokenizer import HFTokenizer

FILES = ["qwen05/model.gguf", "qwen05/hf", "gemma270/model.gguf", "gemma270/hf"]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "<bos>",
    "<start_of_turn>",
    "<table>",
    "[multimodal]",
]
CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two leading,  inner   and trailing blanks   ",
    "\n\n\n\tdef f(x):\n\t\treturn {'a': x ** 2}  # comment\r\n\r\n",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n",
    "a<|im_end|>word <|im_end|> word<|im_end|>\n<eos><bos> <table>\n<unused5>x",
    "don't DON'T I'LL we've 1234567890 3.14159 1,000,000 ½ ² Ⅷ ١٢٣",
    "日本語のテキスト。中文文本，混合 English 文字한국어 텍스트",  # noqa: RUF001
    "e\u0301 u\u0308 a\u030a ﬁ ① ﷺ ḍ̇ क्षि ภาษาไทย שָׁלוֹם العَرَبِيَّة",
    "👩\u200d👩\u200d👧\u200d👦 🇫🇷 👍🏽 🏴\u200d☠️ ❤️ \U0001f9d1\u200d🚀",
    "<0x0A> ▁ ▁▁ Ġ Ċ [PAD151700] \u00a0\u2003\u3000\ufeff\u200b \x00\x01\x7f",
    " " * 70 + "x" + "\n" * 40 + "\t" * 40,
    "https://example.com/a?b=c&d=%20#e user@example.com ~/.cache C:\\path\\file.txt",
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx ==== ---- !!!! ____",
]


@lru_cache(maxsize=4)
def load(path: Path) -> HFTokenizer:
    return HFTokenizer.from_path(path)


@lru_cache(maxsize=2)
def reference(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def original_ids(folder: Path, text: str) -> list[int]:
    """Ids by tokenizer.json; that of Qwen's folder, made from a GGUF file, has lost the normalisation to NFC."""
    ids: list[int] = reference(folder).encode(unicodedata.normalize("NFC", text) if "qwen" in str(folder) else text).ids
    return ids


@pytest.fixture
def tokenizer(real_model, request) -> HFTokenizer:
    return load(real_model(request.param))


@pytest.fixture
def folder(real_model, request) -> Path:
    return real_model(request.param)


both = pytest.mark.parametrize(
    ("tokenizer", "folder"), [(file, f"{file.split('/')[0]}/hf") for file in FILES], indirect=True
)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


@both
@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_ids_equal_the_original_tokenizers(tokenizer, folder, text):
    ids = tokenizer.encode(text)
    assert ids == original_ids(folder, text)
    assert tokenizer.decode(ids) == reference(folder).decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == reference(folder).decode(ids, skip_special_tokens=False)


@both
@quick
@given(
    parts=st.lists(st.one_of(st.text(max_size=12), st.sampled_from([*SPECIAL, " ", "  ", "\n", "'s", "1"])), max_size=8)
)
def test_ids_of_any_text_equal_the_original_tokenizers(tokenizer, folder, parts):
    text = "".join(parts)
    assert tokenizer.encode(text) == original_ids(folder, text)


@both
@quick
@given(data=st.data())
def test_pushed_text_of_any_tokens_joined_is_the_decoded_text(tokenizer, folder, data):
    ids = st.one_of(st.integers(0, tokenizer.size - 1), st.integers(0, 500))  # bytes are among the low ids
    chunks = data.draw(st.lists(st.lists(ids, max_size=4), max_size=12))
    prompt = data.draw(st.lists(ids, max_size=3))
    whole = [token_id for chunk in chunks for token_id in chunk]
    for skip in (True, False):
        detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
        text = "".join([*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()])
        assert text == tokenizer.decode(whole, skip_special_tokens=skip)
        library = reference(folder).decode(whole, skip_special_tokens=skip)
        # In a run of byte tokens with an invalid one the library replaces the valid ones as well.
        assert text == library or ("gemma" in str(folder) and "\ufffd" in text and "\ufffd" in library)


@pytest.mark.parametrize("tokenizer", ["qwen05/model.gguf", "qwen05/hf"], indirect=True)
def test_rows_of_the_model_beyond_the_vocabulary_are_no_ids(tokenizer):
    assert tokenizer.size == 151_665
    assert tokenizer.token_text(151_664) == "<|file_sep|>"


@pytest.mark.parametrize("tokenizer", ["gemma270/model.gguf", "gemma270/hf"], indirect=True)
def test_unused_tokens_of_the_vocabulary_are_ids(tokenizer):
    assert tokenizer.size == 262_144
    assert tokenizer.bos_token_id == 2
    assert tokenizer.encode("")[0] == 2


def test_gguf_files_end_generations_by_all_their_end_tokens(real_model):
    assert set(load(real_model("qwen05/model.gguf")).eos_token_ids) == {151_645, 151_643}
    assert set(load(real_model("gemma270/model.gguf")).eos_token_ids) == {1, 106}


@pytest.mark.parametrize("tokenizer", ["qwen05/model.gguf", "qwen05/hf"], indirect=True)
@pytest.mark.parametrize(
    "tools", [None, [{"type": "function", "function": {"name": "add", "parameters": {"é": "<a>"}}}]]
)
def test_a_real_template_renders_as_in_transformers(tokenizer, real_model, tools):
    from transformers import AutoTokenizer

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}],
        },
        {"role": "tool", "content": "5"},
        {"role": "user", "content": "Thanks"},
    ]
    original = AutoTokenizer.from_pretrained(real_model("qwen05/hf"))
    for conversation in (messages, messages[1:2]):
        expected = original.apply_chat_template(conversation, tools=tools, tokenize=False, add_generation_prompt=True)
        rendered = tokenizer.chat(conversation, tools=tools)
        assert rendered == expected
        assert tokenizer.encode(rendered, add_special_tokens=False) == original.encode(
            rendered, add_special_tokens=False
        )


def test_the_demo_model_has_its_tokenizer_in_its_file(demo_model):
    tokenizer = load(demo_model)
    ids = tokenizer.encode("The capital of France is  Paris 👍")
    assert ids[0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(ids) == "The capital of France is  Paris 👍"
    assert tokenizer.encode("<end_of_turn>\n", add_special_tokens=False) == [106, 107]
