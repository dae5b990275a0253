"""Texts that an output must not contain, as the token sequences that would spell them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.errors import RequestError
from trivet.plan import Ragged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trivet.roles import Tokenizer


def bad_word_sequences(words: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int) -> Ragged | None:
    """The token sequences of ``words``, each once, or None if there are none.

    A word is encoded as it stands at the start of a text and after a blank, since many tokenizers have tokens of their
    own for the latter. A sequence that ends with another one is left out: forbidding the shorter one suffices.

    Raises:
        RequestError: There is no tokenizer, a word gives no tokens, or tokens that the model lacks.
    """
    if not words:
        return None
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and none is selected", param="bad_words")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        texts = [bare, f" {bare}"] if bare else [word]
        plain, *spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        if not plain:
            raise RequestError(
                f"bad_words: {word!r} gives no tokens with this model's tokenizer; leave it out", param="bad_words"
            )
        for sequence in (plain, *(s for s in spaced if s[-len(plain) :] != plain)):
            if max(sequence) >= vocab_size:
                raise RequestError(
                    f"bad_words: {word!r} has token {max(sequence)}, and the model's ids end at {vocab_size - 1}; "
                    "leave it out",
                    param="bad_words",
                )
            found[sequence] = None
    return Ragged.from_rows(list(found))
