"""Chat templates: Jinja programs that come with models and turn a conversation into a prompt.

A template is code from the model's author, so it runs in Jinja's immutable sandbox and sees nothing but JSON data. The
environment (whitespace rules, filters, functions, the ``generation`` tag) is the one templates are written for, that of
transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trivet.errors import ModelLoadError, RequestError

__all__ = ["ChatTemplates", "is_template_text", "read_template"]

DEFAULT = "default"
_WITH_TOOLS = "tool_use"
# Stands behind the message to be continued while it is rendered. The blank at its end shows whether the template strips
# messages; private-use characters do not occur in text.
_MARK = "\ue000continue\ue000"
_MARK_AND_BLANK = _MARK + " "


class _Refusal(jinja2.TemplateError):
    """``raise_exception`` was called by a template."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks what a model wrote, for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it this way)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=64)  # requests may bring templates of their own
def _compile(text: str) -> tuple[jinja2.Template, bool]:
    """A template, and whether it goes through the parts of a message's content."""
    environment = _environment()
    tree = environment.parse(text)
    return environment.from_string(tree), _reads_parts(tree)


def _reads_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether a template loops over a message's ``content`` or takes its elements, so that it expects a list there."""
    names = {"content"}

    def is_content(node: jinja2.nodes.Node | None) -> bool:
        while isinstance(node, jinja2.nodes.Filter):
            node = node.node
        match node:
            case jinja2.nodes.Name():
                return node.name in names
            case jinja2.nodes.Getattr():
                return node.attr == "content"
            case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
                return True
        return False

    for assignment in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    if any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For)):
        return True
    return any(
        isinstance(item.arg, jinja2.nodes.Const) and isinstance(item.arg.value, int) and is_content(item.node)
        for item in tree.find_all(jinja2.nodes.Getitem)
    )


def is_template_text(value: str) -> bool:
    """Whether ``value`` is a Jinja text, not the name of a template or a file."""
    return "{{" in value or "{%" in value or "{#" in value


def read_template(value: str, named: Mapping[str, str]) -> str:
    """The text of a template that the configuration gives as a Jinja text, a file or the name of one of ``named``.

    Raises:
        ModelLoadError: The file is missing or unreadable, or the text is no valid template.
    """
    if is_template_text(value):
        text, where = value, "the text in `chat_template`"
    elif value in named:
        return named[value]
    else:
        path, where = Path(value).expanduser(), value
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            known = f", and the tokenizer has no template of that name ({', '.join(named)})" if named else ""
            raise ModelLoadError(
                f"chat_template: the file {path.absolute()} does not exist{known}; correct the path, or give the Jinja "
                "text"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"chat_template: cannot read {path.absolute()}: {error}; give a text file") from error
    try:
        _compile(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelLoadError(
            f"chat_template: {where} is no valid Jinja template: line {error.lineno}: {error.message}"
        ) from None
    return text


class ChatTemplates:
    """The templates of one tokenizer.

    Args:
        source: Where the tokenizer came from, for messages.
        templates: Name → Jinja text; ``default`` is the one used without a name, ``tool_use`` the one for requests with
            tools.
        variables: What every template sees, such as ``bos_token``.
    """

    def __init__(self, source: str, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._source = source
        self._templates = dict(templates)
        self._variables = dict(variables)

    def __bool__(self) -> bool:
        return DEFAULT in self._templates

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """See :meth:`trivet.roles.tokenizer.Tokenizer.chat`; ``chat_template`` is a Jinja text or a template's name."""
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message: the prompt can end inside the last message or with the start of a new one, "
                "not both; set add_generation_prompt to false",
                param="continue_final_message",
            )
        text = self._select(chat_template, bool(tools))
        try:
            template, reads_parts = _compile(text)
        except jinja2.TemplateSyntaxError as error:
            what = f"{self._name(chat_template)} is no valid Jinja template"
            raise RequestError(f"{what}: line {error.lineno}: {error.message}", param="chat_template") from None
        conversation = _check_messages(messages, reads_parts=reads_parts)
        final = _mark_final(conversation) if continue_final_message else ""
        known = {"documents": None, **self._variables, **_plain(variables, "")}
        rendered = self._render(
            template,
            chat_template,
            {
                **known,
                "messages": conversation,
                "tools": _plain(tools, "tools") if tools is not None else None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut_at_mark(rendered, final) if continue_final_message else rendered

    def _render(self, template: jinja2.Template, chat_template: str | None, variables: dict[str, Any]) -> str:
        try:
            return template.render(variables)
        except _Refusal as refusal:
            raise RequestError(f"the chat template refuses the messages: {refusal.message}", param="messages") from None
        except Exception as error:  # a template is a program and can fail in any way
            raise RequestError(
                f"{self._name(chat_template)} failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def _name(self, chat_template: str | None) -> str:
        return f"the chat template of {self._source}" if chat_template is None else "the given chat template"

    def _select(self, chat_template: str | None, tools: bool) -> str:
        names = ", ".join(sorted(self._templates))
        if chat_template is not None:
            if is_template_text(chat_template):
                return chat_template
            if chat_template in self._templates:
                return self._templates[chat_template]
            have = f"it has: {names}" if names else "it has none"
            raise RequestError(
                f"chat_template: {chat_template!r} is neither a Jinja text nor a template of {self._source} ({have})",
                param="chat_template",
            )
        if tools and _WITH_TOOLS in self._templates:
            return self._templates[_WITH_TOOLS]
        if DEFAULT in self._templates:
            return self._templates[DEFAULT]
        if names:
            raise RequestError(
                f"{self._source} has several chat templates and no default; name one with `chat_template`: {names}",
                param="chat_template",
            )
        raise RequestError(
            f"{self._source} has no chat template, as base models do not; give one with `chat_template` (a file or the "
            "Jinja text in the configuration, the text in a request), or use plain prompts",
            param="chat_template",
        )


def _check_messages(messages: Sequence[Mapping[str, Any]], *, reads_parts: bool) -> list[dict[str, Any]]:
    """The messages as fresh JSON data without null fields, which templates handle worse than absent ones."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: must be a list of messages, got {type(messages).__name__}", param="messages")
    if not messages:
        raise RequestError("messages: must hold at least one message, got none", param="messages")
    conversation: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        plain = _plain(message, path)
        if not isinstance(plain, dict):
            raise RequestError(
                f"{path}: must be a mapping with 'role' and 'content', got {type(message).__name__}", param=path
            )
        fields = {key: value for key, value in plain.items() if value is not None}
        if not isinstance(fields.get("role"), str) or not fields["role"]:
            raise RequestError(
                f"{path}.role: must be a word like 'user', got {fields.get('role')!r}", param=f"{path}.role"
            )
        if isinstance(fields.get("content"), list) and not reads_parts:
            fields["content"] = _join_parts(fields["content"], f"{path}.content")
        conversation.append(fields)
    return conversation


def _join_parts(parts: list[Any], path: str) -> str:
    """The text of a content given in parts, one below the other, for a template that knows only text."""
    texts = []
    for index, part in enumerate(parts):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"{path}[{index}]: the chat template takes only text, got a part of type {kind!r}",
                param=f"{path}[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)


def _plain(value: Any, path: str) -> Any:
    """``value`` rebuilt from plain JSON types: a template must not get hold of objects with methods."""
    if value is None or isinstance(value, bool):
        return value
    for scalar in (str, int, float):
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic models, such as those of the OpenAI client
        return _plain(dump(), path)
    raise RequestError(f"{path}: must be JSON data, got {type(value).__name__}", param=path)


def _mark_final(conversation: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text; returns that text."""
    message, path = conversation[-1], f"messages[{len(conversation) - 1}].content"
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK_AND_BLANK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + _MARK_AND_BLANK
            return text
    raise RequestError(f"{path}: continue_final_message needs a text to continue, got {content!r}", param=path)


def _cut_at_mark(rendered: str, final: str) -> str:
    end = rendered.rfind(_MARK)
    if end < 0 or final.strip() not in rendered:
        raise RequestError(
            "continue_final_message: the chat template changes the last message, so it cannot be continued; leave out "
            "what the template removes (such as reasoning), or start a new message",
            param="continue_final_message",
        )
    kept_blank = rendered.startswith(_MARK_AND_BLANK, end)
    return rendered[:end] if kept_blank else rendered[:end].rstrip()
