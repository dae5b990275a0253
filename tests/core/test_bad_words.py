"""From texts that must not be in an output to token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from trivet.bad_words import bad_word_sequences
from trivet.errors import RequestError
from trivet.roles import Tokenizer


class Words:
    """A tokenizer of words with the blank before them, longest match first; unknown letters give nothing."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens, "nothing is put around a bad word"
        found = []
        while text:
            best = max((piece for piece in self._pieces if text.startswith(piece)), key=len, default="")
            if best:
                found.append(self._pieces.index(best))
            text = text[len(best) or 1 :]
        return found


def sequences(words: Sequence[str], *pieces: str, vocab_size: int = 100) -> list[list[int]]:
    found = bad_word_sequences(words, cast(Tokenizer, cast(Any, Words(*pieces))), vocab_size)
    assert found is not None
    return [found.row(i).tolist() for i in range(len(found))]


def test_a_word_is_forbidden_at_the_start_and_after_a_blank() -> None:
    assert sequences(["cat"], "cat", " cat") == [[0], [1]]
    assert sequences(["cat"], "ca", "t", " ca") == [[0, 1], [2, 1]]
    assert sequences(["cat"], "cat", " c", "at") == [[0], [1, 2]], "however many tokens either has"


def test_a_blank_of_its_own_needs_no_second_sequence() -> None:
    assert sequences(["cat"], " ", "cat") == [[1]]


def test_each_sequence_is_there_once_and_blanks_before_a_word_do_not_matter() -> None:
    assert sequences(["cat", " cat", "dog", "  cat"], "cat", " cat", "dog") == [[0], [1], [2]]


def test_blanks_alone_are_a_word() -> None:
    assert sequences(["\n"], "\n", " ") == [[0]]


def test_no_words_no_sequences() -> None:
    assert bad_word_sequences([], None, 10) is None


@pytest.mark.parametrize(
    ("pieces", "vocab_size", "message"),
    [
        (("b",), 100, "bad_words: 'cat' gives no tokens"),
        (("x", "y", "cat"), 2, "bad_words: 'cat' has token 2, and the model's ids end at 1"),
    ],
)
def test_what_cannot_be_forbidden_is_refused(pieces: tuple[str, ...], vocab_size: int, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        sequences(["cat"], *pieces, vocab_size=vocab_size)
    assert caught.value.param == "bad_words"


def test_without_a_tokenizer_words_are_refused() -> None:
    with pytest.raises(RequestError, match="bad_words need a tokenizer, and none is selected"):
        bad_word_sequences(["cat"], None, 10)
