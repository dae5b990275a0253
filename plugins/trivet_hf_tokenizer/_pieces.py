"""What each token contributes to a text, derived from the decoder of a ``tokenizers`` tokenizer.

A decoder of the ``tokenizers`` library turns a whole list of tokens into text. Here it is taken apart into a rule per
token, so that an output can be decoded as it grows: each token stands for some bytes, and the text is the UTF-8
decoding of all bytes together. Whatever depends on the position (a blank before words, none before the first) is a
second variant of the token's bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivet.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REMEDY = "set `tokenizer` to a folder whose tokenizer.json has the decoder of a language model"


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte in byte-level vocabularies, as in GPT-2: printable Latin-1 is itself, U+0100 … the rest."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()

_TokenStep = Callable[[str, bool], str]
"""Changes one token's text; the flag says whether it is the first of the text."""


@dataclass(slots=True)
class _Rules:
    """A decoder as rules for one token at a time."""

    steps: list[_TokenStep] = field(default_factory=list)
    byte_level: bool = False
    byte_fallback: bool = False
    positional: bool = False
    """Whether the first token of a text is decoded otherwise than the same token later."""
    strip_char: str = ""
    strip_count: int = 0
    fused: bool = False
    """The tokens have been joined: from here on only leading characters can be taken away."""


class Pieces(dict[int, bytes]):
    """Token id → the bytes it adds to a text, filled in as tokens are seen. May be used by several threads.

    An id that the tokenizer does not know has no bytes, as in the ``tokenizers`` library.

    Attributes:
        first: The table for a text's first token; this very object when the position makes no difference.
        special_ids: Ids left out of a text when special tokens are skipped.
        added_ids: Ids of all added tokens, special or not.
        replace_each_byte: How invalid UTF-8 becomes U+FFFD: one per byte, as sentencepiece does for its byte tokens,
            or one per maximal invalid part, as Unicode recommends and byte-level decoders do.
        strip_char: Character taken away from the start of a text, at most ``strip_count`` times.
    """

    def __init__(self, backend: Backend, source: str) -> None:
        super().__init__()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._rules = _compile(backend, source)
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.replace_each_byte = self._rules.byte_fallback
        self.strip_char = self._rules.strip_char
        self.strip_count = self._rules.strip_count
        self.first: dict[int, bytes] = _FirstPieces(self) if self._rules.positional else self

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self.make(token_id, first=False)
        return piece

    def make(self, token_id: int, *, first: bool) -> bytes:
        """The bytes of a token in one of the two positions."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        rules = self._rules
        for step in rules.steps:
            token = step(token, first)
        if rules.byte_level and token_id not in self.added_ids:
            codes = [_BYTE_LEVEL.get(char, -1) for char in token]
            # A token outside the byte alphabet stands for its own text.
            return bytes(codes) if -1 not in codes else token.encode()
        if rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


class _FirstPieces(dict[int, bytes]):
    """The table of :attr:`Pieces.first`."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._pieces.make(token_id, first=True)
        return piece


def _compile(backend: Backend, source: str) -> _Rules:
    rules = _Rules()
    if backend.decoder is None:  # the library joins such tokens with blanks
        rules.positional = True
        rules.steps.append(lambda token, first: token if first else f" {token}")
        return rules
    spec = json.loads(backend.decoder.__getstate__())
    for part in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
        if rules.fused and part["type"] not in {"Fuse", "Strip"}:
            raise ModelLoadError(
                f"{source}: the decoder {part['type']} cannot follow another that joins all tokens; {_REMEDY}"
            )
        _add(rules, part, source)
    return rules


def _add(rules: _Rules, part: Mapping[str, Any], source: str) -> None:
    from tokenizers import Regex, decoders

    match part:
        case {"type": "ByteLevel"}:
            rules.byte_level = rules.fused = True
        case {"type": "ByteFallback"}:
            rules.byte_fallback = True
        case {"type": "Fuse"}:
            rules.fused = True
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            rules.steps.append(lambda token, _: token.replace(pattern, content))
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}:
            regex = decoders.Replace(Regex(pattern), content)
            rules.steps.append(lambda token, _: regex.decode([token]))
        case {"type": "Metaspace", "replacement": replacement, **rest}:
            scheme = rest.get("prepend_scheme", "always")
            metaspace = decoders.Metaspace(replacement=replacement, prepend_scheme=scheme)
            rules.positional = scheme != "never"
            rules.steps.append(lambda token, first: metaspace.decode([token] if first else ["", token]))
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            wordpiece = decoders.WordPiece(prefix=prefix, cleanup=cleanup)
            rules.positional = True
            rules.steps.append(lambda token, first: wordpiece.decode([token] if first else ["", token]))
        case {"type": "Strip", "content": char, "start": count, "stop": 0} if rules.fused:
            rules.strip_char, rules.strip_count = char, count
        case {"type": "Strip", "content": char, "start": start, "stop": stop} if not rules.fused:
            strip = decoders.Strip(char, start, stop)
            rules.steps.append(lambda token, _: strip.decode([token]))
        case _:
            raise ModelLoadError(f"{source}: the decoder {json.dumps(part)} does not work token by token; {_REMEDY}")
