"""What a chat is given: conversations, each a list of messages, and variables of the chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trivet.errors import RequestError

Message = Mapping[str, Any]

_ARGUMENTS = ("tools", "chat_template", "add_generation_prompt", "continue_final_message")


def conversations_of(messages: Any) -> list[Sequence[Message]]:
    """The conversations in ``messages``: one, or a list of several.

    Raises:
        RequestError: If there is none, or one is no list of messages; with its place if there are several.
    """
    if isinstance(messages, str | bytes | Mapping) or (messages is not None and not isinstance(messages, Iterable)):
        return [check_conversation(messages)]  # which refuses it
    items = list(messages or ())
    if not items or any(isinstance(item, Mapping) for item in items):
        return [check_conversation(items)]
    several = len(items) > 1
    return [check_conversation(item, f"conversation {i}: " if several else "") for i, item in enumerate(items)]


def check_conversation(conversation: Any, where: str = "") -> Sequence[Message]:
    """The same conversation; raises RequestError, which begins with ``where``, unless it is a list of messages."""
    problem = None
    if not isinstance(conversation, Sequence) or isinstance(conversation, str | bytes):
        problem = f"must be a list of messages like {{'role': 'user', 'content': '...'}}, got {conversation!r}"
    elif not conversation:
        problem = "must have at least one message, got none"
    else:
        wrong = [message for message in conversation if not isinstance(message, Mapping)]
        if wrong:
            problem = f"each must be a mapping with role and content, got {wrong[0]!r}"
    if problem is not None:
        raise RequestError(f"{where}messages: {problem}", param="messages")
    return conversation  # type: ignore[no-any-return]  # checked just now


def template_variables(given: Any) -> dict[str, Any]:
    """The further variables of a chat template.

    Raises:
        RequestError: If ``given`` is no mapping, or sets what has an argument of its own.
    """
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(
            f"chat_template_kwargs: must be a mapping from names to values, got {given!r}", param="chat_template_kwargs"
        )
    variables = dict(given or {})
    for name in variables:
        if name in _ARGUMENTS:
            problem = "has an argument of its own; give it there"
        elif not isinstance(name, str) or name == "messages":
            problem = "is no name of a variable"
        else:
            continue
        raise RequestError(f"chat_template_kwargs: {name!r} {problem}", param="chat_template_kwargs")
    return variables
