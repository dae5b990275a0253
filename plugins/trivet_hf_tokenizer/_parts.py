"""What a tokenizer is made of, whatever files it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_PADDING = re.compile(r"\[PAD(\d+)\]")


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A loaded tokenizer.

    Attributes:
        source: The folder or file, for messages.
        backend: The tokenizer of the ``tokenizers`` library, special tokens registered, without truncation or padding.
        size: Number of ids, see :func:`count_ids`.
        bos_token_id: Id of the token that begins a text, if the model has one.
        eos_token_ids: Ids that end a generation, without repetition.
        special_tokens: Name → text, such as ``{"bos_token": "<s>"}``; chat templates see them as variables.
        chat_templates: Name → Jinja text.
    """

    source: str
    backend: Backend
    size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def count_ids(backend: Backend) -> int:
    """One more than the highest id that stands for a token.

    Converters to GGUF fill the vocabulary up to the number of rows of the model's matrices with ``[PAD151665]`` and so
    on, each named after its own id; at the end of a vocabulary these are rows without a meaning, not tokens.
    """
    size = backend.get_vocab_size(with_added_tokens=True)
    # A dictionary of all tokens takes tens of MiB, which Python does not give back as a whole.
    if any(backend.id_to_token(token_id) is None for token_id in range(size)):
        size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    added = backend.get_added_tokens_decoder()
    while size and size - 1 not in added and is_padding(backend.id_to_token(size - 1), size - 1):
        size -= 1
    return size


def is_padding(token: str | None, token_id: int) -> bool:
    """Whether a vocabulary entry is a converter's filling for the row ``token_id``."""
    match = _PADDING.fullmatch(token) if token else None
    return match is not None and int(match[1]) == token_id


def unique(ids: Iterable[int | None]) -> tuple[int, ...]:
    """The ids without None and repetitions, in order of first appearance."""
    return tuple(dict.fromkeys(i for i in ids if i is not None))
