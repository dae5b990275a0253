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
from trivet_schemas.errors import show

__all__ = ["ChatTemplates", "is_template_text", "read_template"]

DEFAULT = "default"
_WITH_TOOLS = "tool_use"
# Stands behind the message to be continued while it is rendered. The blank at its end shows whether the template strips
# messages; private-use characters do not occur in text.
_MARK = "\ue000continue\ue000"
_MARK_AND_BLANK = _MARK + " "
_TOOL = "{'type': 'function', 'function': {'name': '...', 'parameters': {...}}}"


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
        described = _check_tools(tools)
        text = self._select(chat_template, bool(described))
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
                "tools": described,
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
        _check_content(fields, path)
        if "tool_calls" in fields:
            _check_calls(fields["tool_calls"], f"{path}.tool_calls")
        if isinstance(fields.get("content"), list) and not reads_parts:
            fields["content"] = _join_parts(fields["content"], f"{path}.content")
        conversation.append(fields)
    return conversation


def _check_content(fields: Mapping[str, Any], path: str) -> None:
    content, where = fields.get("content"), f"{path}.content"
    if content is None:
        if fields.get("tool_calls"):
            return
        problem = "is missing, and the message has no tool_calls; give a text, '' for none"
    elif isinstance(content, list):
        wrong = [i for i, part in enumerate(content) if not isinstance(part, str | dict)]
        if not wrong:
            return
        where = f"{where}[{wrong[0]}]"
        problem = f"must be a part like {{'type': 'text', 'text': '...'}}, got {show(content[wrong[0]])}"
    elif isinstance(content, str):
        return
    else:
        problem = f"must be a text or a list of parts, got {show(content)}"
    raise RequestError(f"{where}: {problem}", param=where)


def _check_calls(calls: Any, path: str) -> None:
    """Put objects in the place of arguments that are JSON texts, the form of OpenAI's API; templates expect objects."""
    if not isinstance(calls, list):
        raise RequestError(f"{path}: must be a list of calls, got {show(calls)}", param=path)
    for index, call in enumerate(calls):
        where = f"{path}[{index}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            form = "{'type': 'function', 'function': {'name': '...', 'arguments': {...}}}"
            raise RequestError(f"{where}: must be a call like {form}, got {show(call)}", param=where)
        if function is not call:
            where = f"{where}.function"
        given = function.get("arguments")
        try:
            arguments = (json.loads(given) if given else {}) if isinstance(given, str) else given or {}
        except (ValueError, RecursionError) as error:
            problem = f"is no valid JSON ({error}), got {show(given)}; give an object, or its JSON text"
            raise RequestError(f"{where}.arguments: {problem}", param=f"{where}.arguments") from None
        if not isinstance(arguments, dict):
            problem = f"must be an object, or its JSON text, got {show(given)}"
            raise RequestError(f"{where}.arguments: {problem}", param=f"{where}.arguments")
        function["arguments"] = arguments


def _check_tools(tools: Any) -> list[Any] | None:
    """The tools as fresh JSON data."""
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools: must be a list of descriptions like {_TOOL}, got {show(tools)}", param="tools")
    described: list[Any] = _plain(list(tools), "tools")
    for index, tool in enumerate(described):
        path = f"tools[{index}]"
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{path}: must be a description like {_TOOL}, got {show(tool)}", param=path)
        if function is not tool and not isinstance(function.get("name"), str):
            path = f"{path}.function.name"
            raise RequestError(f"{path}: must be a string, got {show(function.get('name'))}", param=path)
    return described


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
