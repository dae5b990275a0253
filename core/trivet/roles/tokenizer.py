"""Role ``tokenizer``: text to ids and back, chat templates. Lives with the engine's front, imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trivet.roles.base import Role


class Detokenizer(ABC):
    """Text of one growing output, in time proportional to the new tokens. Text given out never changes later and never
    splits a character: bytes that may still become one are held back until they do, or until :meth:`flush`."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text that has become final."""

    @abstractmethod
    def flush(self) -> str:
        """The text still held back (an unfinished character as U+FFFD); the output has ended. Joined with what
        :meth:`push` returned it equals :meth:`Tokenizer.decode` of all tokens."""


class Tokenizer(Role):
    """All methods may be called from several threads."""

    role: ClassVar[str] = "tokenizer"

    @property
    @abstractmethod
    def size(self) -> int:
        """Ids are ``0 … size - 1`` (added tokens included)."""

    @property
    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation according to the tokenizer's or model's own files."""

    @property
    @abstractmethod
    def bos_token_id(self) -> int | None:
        """The id put before a text when special tokens are added."""

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; special tokens written in it are recognised."""

    def encode_pair(self, text: str, other: str) -> list[int]:
        """Ids of two texts that a model reads together, with the special tokens that belong around and between them;
        by default the one behind the other."""
        return [*self.encode(text), *self.encode(other, add_special_tokens=False)]

    @abstractmethod
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of ``token_ids``; invalid UTF-8 becomes U+FFFD, never an exception."""

    @abstractmethod
    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """A detokenizer for an output that follows ``prompt_ids`` (they decide about a leading space)."""

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """One token as text, for logprobs; U+FFFD for part of a character."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` works without a template of the caller's."""

    @abstractmethod
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation; the result is encoded with ``add_special_tokens=False``. Raises
        :class:`trivet.errors.RequestError` for messages of a wrong shape and for templates that refuse them."""
