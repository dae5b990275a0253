"""Text of a growing output, in time proportional to the new tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trivet.roles.tokenizer import Detokenizer

if TYPE_CHECKING:
    from trivet_hf_tokenizer._pieces import Pieces

_UTF8 = codecs.getincrementaldecoder("utf-8")
_ESCAPED_BYTES = re.compile("[\udc80-\udcff]")


class StreamDetokenizer(Detokenizer):
    """Joins the tokens' bytes and decodes them as UTF-8 that arrives piece by piece.

    Every rule looks at one token and a constant amount of state, so the result is the same however the tokens are
    cut into calls, and decoding everything at once is this class used once.

    Args:
        pieces: The bytes of each token.
        prompt_ids: Tokens before the output. They only decide whether the output begins a text, which for some
            vocabularies means that a leading blank is not part of it; bytes of an unfinished character at the
            prompt's end do not carry over.
        skip_special_tokens: Leave special tokens out.
        spaces_between_special_tokens: Whether an added token right after another is set apart by a blank, in
            vocabularies whose decoder puts blanks between tokens. Without effect when special tokens are skipped.
    """

    __slots__ = ("_begins", "_glued", "_last_added", "_pieces", "_skipped", "_strip", "_utf8")

    def __init__(
        self,
        pieces: Pieces,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._pieces = pieces
        self._skipped: frozenset[int] = pieces.special_ids if skip_special_tokens else frozenset()
        self._glued = pieces.first is not pieces and not skip_special_tokens and not spaces_between_special_tokens
        self._begins = pieces.first is not pieces
        self._last_added = False
        self._strip = pieces.strip_count
        self._utf8 = self._new_decoder()
        if prompt_ids and (self._begins or self._strip):
            for token_id in prompt_ids:
                self.push((token_id,))
                if not self._begins and not self._strip:
                    break
            self._utf8 = self._new_decoder()
        if prompt_ids:
            self._last_added = prompt_ids[-1] in pieces.added_ids

    def push(self, token_ids: Sequence[int]) -> str:
        pieces, skipped = self._pieces, self._skipped
        if self._begins or self._glued:
            data = b"".join([self._positioned(token_id) for token_id in token_ids if token_id not in skipped])
        else:
            data = b"".join([pieces[token_id] for token_id in token_ids if token_id not in skipped])
        return self._decode(data, final=False)

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _new_decoder(self) -> codecs.IncrementalDecoder:
        # "surrogateescape" keeps invalid bytes apart, one character each, until they are replaced.
        return _UTF8("surrogateescape" if self._pieces.replace_each_byte else "replace")

    def _positioned(self, token_id: int) -> bytes:
        """The bytes of a token where its place in the text matters."""
        added = self._glued and token_id in self._pieces.added_ids
        first = self._begins or (added and self._last_added)
        self._begins, self._last_added = False, added
        return self._pieces.first[token_id] if first else self._pieces[token_id]

    def _decode(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._pieces.replace_each_byte and not text.isascii():
            text = _ESCAPED_BYTES.sub("\ufffd", text)
        if self._strip and text:
            kept = text.lstrip(self._pieces.strip_char)
            stripped = min(len(text) - len(kept), self._strip)
            text = text[stripped:]
            self._strip = 0 if text else self._strip - stripped
        return text
