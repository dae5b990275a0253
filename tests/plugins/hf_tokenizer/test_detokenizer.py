"""Incremental text equals whole text, whatever the tokens and however they arrive."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trivet_hf_tokenizer._detokenizer import StreamDetokenizer
from trivet_hf_tokenizer._parts import TokenizerParts, count_ids
from trivet_hf_tokenizer.tokenizer import HFTokenizer

KINDS = ["byte-level", "llama", "gemma", "metaspace", "wordpiece", "no decoder"]


def make(backend: Tokenizer) -> HFTokenizer:
    return HFTokenizer(TokenizerParts("test", backend, count_ids(backend)))


def stream(
    tokenizer: HFTokenizer, chunks: list[list[int]], prompt: list[int] | None = None, **flags: bool
) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt or [], **flags)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def byte(tokenizer: HFTokenizer, value: int) -> int:
    """The id of the token that is one byte."""
    return next(i for i in range(tokenizer.size) if tokenizer.token_bytes(i) == bytes([value]))


def chunked(size: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, size - 1), max_size=5), max_size=12)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_pushed_text_joined_is_the_decoded_text(backends, kind, spaces, skip, data):
    tokenizer = make(backends[kind])
    # Ids past the end stand for the rows that a model has beyond its vocabulary.
    chunks = data.draw(chunked(tokenizer.size + 2))
    ids = [token_id for chunk in chunks for token_id in chunk]
    flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    assert "".join(stream(tokenizer, chunks, **flags)) == tokenizer.decode(ids, **flags)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(data=st.data())
def test_decoded_text_is_that_of_the_tokenizers_library(backends, kind, skip, data):
    backend = backends[kind]
    tokenizer = make(backend)
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=30))
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    reference = backend.decode(ids, skip_special_tokens=skip)
    if kind in {"llama", "gemma"} and "\ufffd" in reference:
        # The library replaces every byte of a run in which one is invalid; here characters that were whole stay.
        assert "\ufffd" in text
        assert len(text) <= len(reference)
    else:
        assert text == reference


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_a_text_comes_back(backends, kind):
    tokenizer = make(backends[kind])
    text = "hello hello" if kind in {"metaspace", "wordpiece", "no decoder"} else "hello wörld ✓ 👍🏽\n\n  日本語é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = backends[kind].decode(ids)
    assert "".join(stream(tokenizer, [[i] for i in ids])) == expected
    if kind in {"byte-level", "llama", "gemma"}:
        assert expected == text


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
def test_a_character_appears_with_its_last_byte(backends, kind):
    tokenizer = make(backends[kind])
    ids = [byte(tokenizer, value) for value in "👍".encode()]
    assert stream(tokenizer, [[i] for i in ids]) == ["", "", "", "👍", ""]


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
def test_an_unfinished_character_at_the_end_is_replaced(backends, kind):
    tokenizer = make(backends[kind])
    ids = [byte(tokenizer, value) for value in "é".encode()[:1]]
    assert stream(tokenizer, [ids]) == ["", "\ufffd"]


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
def test_an_invalid_byte_is_replaced_as_soon_as_it_cannot_become_a_character(backends, kind):
    tokenizer = make(backends[kind])
    letter = tokenizer.encode("h", add_special_tokens=False)[-1:]
    assert stream(tokenizer, [[byte(tokenizer, 0xFF)], letter]) == ["\ufffd", "h", ""]
    assert stream(tokenizer, [[byte(tokenizer, 0xC3)], letter]) == ["", "\ufffdh", ""]


def test_a_cut_character_is_one_replacement_in_byte_level_text_and_one_per_byte_in_sentencepiece(backends):
    for kind, expected in (("byte-level", "\ufffd"), ("gemma", "\ufffd\ufffd\ufffd")):
        tokenizer = make(backends[kind])
        ids = [byte(tokenizer, value) for value in "👍".encode()[:3]]
        assert tokenizer.decode(ids) == expected == backends[kind].decode(ids)


def test_characters_that_were_whole_stay_when_an_invalid_byte_follows(backends):
    tokenizer = make(backends["gemma"])
    ids = [byte(tokenizer, value) for value in "é".encode() + b"\xff"]
    assert stream(tokenizer, [[i] for i in ids]) == ["", "é", "\ufffd", ""]


def test_special_tokens_are_left_out_or_shown_as_asked(backends):
    tokenizer = make(backends["byte-level"])
    ids = tokenizer.encode("<|start|>hello<tool> wor<|end|>")
    assert tokenizer.decode(ids) == "hello<tool> wor"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>hello<tool> wor<|end|>"


def test_a_character_continues_across_a_special_token_that_is_left_out(backends):
    tokenizer = make(backends["byte-level"])
    first, second = (byte(tokenizer, value) for value in "é".encode())
    (special,) = tokenizer.encode("<|end|>")
    assert stream(tokenizer, [[first], [special], [second]]) == ["", "", "é", ""]
    assert stream(tokenizer, [[first], [special], [second]], skip_special_tokens=False)[1] == "\ufffd<|end|>"


def test_the_leading_blank_of_sentencepiece_is_no_part_of_a_text(backends):
    tokenizer = make(backends["llama"])
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hello world"
    # The text of one blank is two of them in the vocabulary, of which one is the mark of the start.
    assert tokenizer.decode(tokenizer.encode(" ", add_special_tokens=False)) == " "


def test_after_a_prompt_the_leading_blank_is_a_part_of_the_output(backends):
    tokenizer = make(backends["llama"])
    prompt, output = tokenizer.encode("hello"), tokenizer.encode("world", add_special_tokens=False)
    assert "".join(stream(tokenizer, [output], prompt)) == " world"


def test_a_prompt_of_skipped_special_tokens_leaves_the_output_at_the_start_of_a_text(backends):
    tokenizer = make(backends["llama"])
    output = tokenizer.encode("world", add_special_tokens=False)
    assert "".join(stream(tokenizer, [output], [1])) == "world"
    assert "".join(stream(tokenizer, [output], [1], skip_special_tokens=False)) == " world"


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece", "no decoder"])
def test_the_first_word_after_a_prompt_is_set_apart(backends, kind):
    tokenizer = make(backends[kind])
    hello = tokenizer.encode("▁hello" if kind == "metaspace" else "hello", add_special_tokens=False)
    assert "".join(stream(tokenizer, [hello])) == "hello"
    assert "".join(stream(tokenizer, [hello], hello)) == " hello"


def test_an_unfinished_character_of_the_prompt_does_not_leak_into_the_output(backends):
    tokenizer = make(backends["llama"])
    first, second = (byte(tokenizer, value) for value in "é".encode())
    assert "".join(stream(tokenizer, [[second]], [first])) == "\ufffd"


def test_spaces_between_special_tokens_can_be_left_out(backends):
    tokenizer = make(backends["no decoder"])
    ids = tokenizer.encode("hello <s> <tool> </s> world")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello <s> <tool> </s> world"
    glued = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert glued == "hello <s><tool></s> world"
    assert "".join(
        stream(tokenizer, [ids[2:]], ids[:2], skip_special_tokens=False, spaces_between_special_tokens=False)
    ) == ("<tool></s> world")


def test_an_id_that_no_token_has_adds_nothing(backends):
    tokenizer = make(backends["byte-level"])
    (letter,) = tokenizer.encode("h")
    assert tokenizer.decode([letter, tokenizer.size + 10, letter]) == "hh"


class _Counting:
    """A table of pieces that counts what is read from it."""

    def __init__(self, pieces):
        self._pieces = pieces
        self.first = self if pieces.first is pieces else pieces.first
        self.read = 0

    def __getattr__(self, name):
        return getattr(self._pieces, name)

    def __getitem__(self, token_id):
        self.read += 1
        return self._pieces[token_id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_however_long_the_text(backends, kind):
    tokenizer = make(backends[kind])
    counting = _Counting(tokenizer._pieces)
    detokenizer = StreamDetokenizer(counting, prompt_ids=[tokenizer.size - 1] * 500)
    behind_prompt = counting.read
    assert behind_prompt <= 500
    pushed = [i % tokenizer.size for i in range(4000)]
    reads = []
    for token_id in pushed:
        before = counting.read
        text = detokenizer.push([token_id])
        reads.append(counting.read - before)
        # An unfinished character of three bytes may come out with what follows it.
        assert len(text) <= 3 + len(tokenizer._pieces.first[token_id]) + len(tokenizer._pieces[token_id])
    assert max(reads) <= 1
